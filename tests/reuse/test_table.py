"""Reuse methods by name: ours, those of other packages, and the error for an unknown one."""

from __future__ import annotations

from pathlib import Path

import pytest

from keyhole.errors import ConfigError, UnknownNameError
from keyhole.reuse import available_reuse_methods, make_reuse
from keyhole.reuse.sam_kv import SamKV

CODE = '''
from dataclasses import dataclass

from keyhole.config import setting
from keyhole.reuse.base import Reuse


@dataclass(frozen=True, kw_only=True)
class Mine(Reuse):
    """Mine."""

    name = "mine"
    many: int = setting(5, "how many")
'''


def test_every_method_is_named_as_in_the_table_and_described() -> None:
    table = available_reuse_methods()
    assert list(table) == ["recompute", "reuse", "sam_kv", "cacheblend", "epic", "multi_infllm"]
    for name, cls in table.items():
        assert cls.name == name
        assert cls.__doc__
        assert make_reuse(name) == cls()


def test_sam_kv_is_meant_when_none_is_named() -> None:
    assert make_reuse(None) == SamKV()
    assert make_reuse(None, {"update": "fusion"}) == SamKV(update="fusion")


def test_an_object_is_taken_as_it_is() -> None:
    method = SamKV(bias=False)
    assert make_reuse(method) is method
    with pytest.raises(ConfigError, match=r"\['bias'\] can be given with a reuse method's name"):
        make_reuse(method, {"bias": True})


def test_the_nearest_name_is_offered() -> None:
    with pytest.raises(UnknownNameError, match="reuse method 'sam_k'; did you mean 'sam_kv'"):
        make_reuse("sam_k")
    with pytest.raises(UnknownNameError, match="did you mean 'update'"):
        make_reuse("sam_kv", {"updat": "fusion"})


def test_one_of_another_package_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    info = tmp_path / "elsewhere-1.0.dist-info"
    info.mkdir()
    (tmp_path / "elsewhere_reuses.py").write_text(CODE)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: elsewhere\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(
        "[keyhole.reuses]\nmine = elsewhere_reuses:Mine\nepic = elsewhere_reuses:Mine\n"
        "broken = elsewhere_reuses:CODE\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    assert make_reuse("mine", {"many": 3}).name == "mine"
    assert make_reuse("epic").name == "epic"  # ours cannot be replaced
    with pytest.raises(ConfigError, match=r"reuse method 'broken' cannot be loaded"):
        make_reuse("broken")
