"""A task with physics in its reward: change a semiconductor so that its band gap falls into a window.

`compounds` and `bands` are the physics, `modification` is what a proposal may say, `judge` scores one, `rewards` are the
components of a recipe, `rows` are prompts and demonstrations.
"""
