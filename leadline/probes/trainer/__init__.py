"""A whole trainer's loss, advantages and rollout weights against the equations. In reading order:

seam        the installed TRL's own code as functions of a `ProbeBatch`
scenarios   its settings, and the equation that each is meant to be
conform     each scenario, explained
page        the result on a terminal and as Markdown
"""
