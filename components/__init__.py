"""The parts of CUDA Agent, from `core` (lowest) to `cli` (highest); docs/architecture.md lists the layers."""
