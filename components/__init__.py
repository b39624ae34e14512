"""The parts of CUDA Agent, from `core` (lowest) to `cli` (highest); see CONTRIBUTING.md for the layers."""
