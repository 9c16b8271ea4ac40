"""Data sets as tasks: every training batch is a pure function of its index, so a run can resume exactly."""
