"""Ordinary training scripts, each as a job and in plain torch beside it.

A script is a module with two functions. `train(folder)` is what its writer made of it by docs/training.md: it
makes an `elasticd.Job` and loops over its steps; `folder` is for its checkpoints. `plain(order)` is the same in
plain torch, in float64 and one process, a loop that knows nothing of elasticd; `order` has the indices of each
step's samples. It returns the losses and the last weights (`ordinary.Outcome`). `LAYOUT` names what the third
plan does with two devices. What either function returns or notes beside that is compared as well.
"""
