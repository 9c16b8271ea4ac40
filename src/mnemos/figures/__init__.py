"""Results in, pictures and one self-contained HTML report out; never trains."""
