"""Two ranks that shard a model write the same checkpoint as one process, and hold one bucket at a time."""

import json
from pathlib import Path

from rank_processes import two_ranks
from stream_fixtures import ADAPTED, CASES, LIMIT_BYTES, fill_adapter, save, start_model

from components.core.files import digest_tree
from components.policy.adapter import add_adapter


def test_a_sharded_model_is_written_like_a_whole_one_and_never_gathered_as_a_whole(tmp_path: Path) -> None:
    for case in CASES:
        start_model(case).save_pretrained(tmp_path / case / "start")
    two_ranks("stream_fixtures.py", tmp_path)
    for case, (_, _, is_adapted) in CASES.items():
        model = start_model(case)
        if is_adapted:
            add_adapter(model, ADAPTED)
            fill_adapter(model)
        save(tmp_path / case / "expected", model)
        assert digest_tree(tmp_path / case / "saved") == digest_tree(tmp_path / case / "expected"), case
        for rank in range(2):
            held = json.loads((tmp_path / case / f"rank-{rank}.json").read_text())
            assert held["before"] == held["after"] == 0, case
            assert 0 < max(held["during"]) <= max(LIMIT_BYTES, held["largest"]) < held["total"] / 2, case
