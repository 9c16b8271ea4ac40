"""Writing with a model: streams, sampling and the fused step."""
