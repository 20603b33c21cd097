"""Every error that leadline raises on purpose.

    LeadlineError
    ├── ConfigError (ValueError)   a setting, or two that contradict; raised before anything is loaded
    ├── DataError                  a dataset, column, prompt or chat template that cannot be used
    ├── ModelError                 a model that cannot be found, loaded or packed
    ├── RewardError                a reward that is unknown, has the wrong shape, or fails too often
    ├── EngineError                the engine cannot sample, or broke its contract
    ├── StalledError               nothing has moved for `run.stall_limit_s`
    ├── StalenessError             a token older than `rollout.max_staleness` reached the trainer
    ├── NoSignalError              no group of a step carries a learning signal, refill after refill
    ├── TrainingError              too many discarded steps, or the weights are not finite
    ├── RunDirError                the run directory cannot be written, read or resumed
    └── LogError                   a log, config or rule that the doctor is asked about cannot be read or is not there

Messages have one form: `<setting> is <value>, but <fact>. <Consequence>. <Do this.>`
A bad *rollout* is data, not an error: it becomes a `Rollout` with `error` set, and is counted.
"""


class LeadlineError(Exception):
    """Anything a user can act on. The command line prints it without a traceback and exits with 2."""


class ConfigError(LeadlineError, ValueError):
    """A setting is unknown, out of range, or contradicts another."""


class DataError(LeadlineError):
    """A dataset, a column, a prompt or a chat template cannot be used."""


class ModelError(LeadlineError):
    """A model or tokenizer cannot be found, loaded or trusted."""


class RewardError(LeadlineError):
    """A reward is unknown, returns the wrong shape, or fails too often."""


class EngineError(LeadlineError):
    """The engine cannot sample, or broke its contract."""


class StalledError(LeadlineError):
    """Nothing moves: somebody waits for what never comes."""


class StalenessError(LeadlineError):
    """A token older than the bound reached the trainer: a defect of the queue, never of the user."""


class NoSignalError(LeadlineError):
    """Group after group carries no learning signal."""


class TrainingError(LeadlineError):
    """Training cannot go on without corrupting the weights."""


class RunDirError(LeadlineError):
    """The run directory cannot be written, read or resumed."""


class LogError(LeadlineError):
    """What the doctor is asked about cannot be read, or is not there."""
