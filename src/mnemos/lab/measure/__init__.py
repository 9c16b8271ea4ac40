"""Measurements of programs, each of a call that a caller makes.

Seconds: `timing` lets what is compared take turns, `decoding` times single steps. Bytes: `peak` is that of a process or
of its tensors, `gradients` what autograd keeps and what a state has. Operations: `flops` counts them.
"""
