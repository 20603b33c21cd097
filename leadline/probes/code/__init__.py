"""The user's own functions against the equations, and the name of the bug where they differ. In reading order:

batch       the seeded ragged batches
words       what the usual parameter names mean
load        from `package.module:function` to a function
binding     from a function's signature to a call on a batch, in one of its `layouts`
outcome     values and gradient of one call, and when two are the same
search      which variant, mutation or pair of mutations reproduces an outcome
loss, kl, logprobs, importance, advantages, decoding, collating
            each role: its equation in exchangeable steps, and the variants that are right
mutations/  the bugs of each role, each as one change of a step
explain     a function in each layout, explained
edges, checks
            what must hold at the edges, in half precision, and of gradients and arguments
examine     one function of tensors, from its signature to a report
structures  the same for decoders and collators, which are not of tensors
canaries, reward, group_signal
            a reward has no equation: texts whose reward is known, and how much signal real completions give
report      the result on a terminal and as JSON
"""
