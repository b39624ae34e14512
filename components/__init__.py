"""The parts of CUDA Agent, without any orchestrator: `core` and `storage` below, `cli` above; see CONTRIBUTING.md for the layers."""
