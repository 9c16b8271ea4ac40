"""Models as programs: a step and a prefill, state in and state out, that run without this library or PyTorch."""
