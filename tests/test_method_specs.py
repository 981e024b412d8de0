"""Names with settings in one text, for one method and for several."""

from __future__ import annotations

from pathlib import Path

import pytest

from keyhole import CacheBlend, Delta, Epic, FullReuse, Quest, SamKV, StreamingLLM
from keyhole.errors import ConfigError
from keyhole.policies import make_policy
from keyhole.policies.base import Policy
from keyhole.registry import SettingsFile, parse, written
from keyhole.reuse import make_reuse
from keyhole.reuse.base import Reuse


@pytest.mark.parametrize(
    ("text", "policy"),
    [
        ("delta", Delta()),
        ("DELTA", Delta()),
        ("Streaming-LLM:sink_size=8", StreamingLLM(sink_size=8)),
        ("StreamingLLM:sink-size=8", StreamingLLM(sink_size=8)),
        (
            "delta:token_budget=512,recent_pages=4,full_layers=0,1,delta_layers=2",
            Delta(token_budget=512, recent_pages=4, full_layers=(0, 1), delta_layers=(2,)),
        ),
        (
            "delta: token_budget = 512, full_layers = 0, 1",
            Delta(token_budget=512, full_layers=(0, 1)),
        ),
        ("delta:layers=a.json", Delta(layers="a.json")),
        ("quest:full_layers=,sink_size=16", Quest(full_layers=(), sink_size=16)),
        ("quest:share_group=false", Quest(share_group=False)),
        ("quest:share_group=True", Quest()),
    ],
)
def test_a_policy_is_made_of_its_text(text: str, policy: Policy) -> None:
    assert make_policy(text) == policy


@pytest.mark.parametrize(
    ("text", "reuse"),
    [
        ("SamKV:update=fusion,block_size=16", SamKV(update="fusion", block_size=16)),
        ("sam_kv:select=false,stable_layers=1,2", SamKV(select=False, stable_layers=(1, 2))),
        ("reuse:rotate=false", FullReuse(rotate=False)),
        ("epic:num_initial=3", Epic(num_initial=3)),
        (
            "cacheblend:recompute_ratio=0.5,check_layer=2",
            CacheBlend(recompute_ratio=0.5, check_layer=2),
        ),
    ],
)
def test_a_reuse_method_is_made_of_its_text(text: str, reuse: Reuse) -> None:
    assert make_reuse(text) == reuse


def test_separate_settings_override_those_in_the_name(tmp_path: object) -> None:
    assert make_policy("quest:token_budget=64", {"token_budget": 32}) == Quest(token_budget=32)


def test_settings_behind_a_settings_file_come_before_its_own(
    tmp_path: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(str(tmp_path))
    stored = {"token_budget": 256, "full_layers": [0]}
    SettingsFile(policy="quest", settings=stored).save("mine.json")
    assert make_policy("mine.json:token_budget=64") == Quest(token_budget=64, full_layers=(0,))


def test_a_settings_file_may_begin_with_a_byte_order_mark(tmp_path: Path) -> None:
    path = tmp_path / "mine.json"
    path.write_text('{"policy": "quest", "settings": {"token_budget": 64}}', encoding="utf-8-sig")
    assert make_policy(str(path)) == Quest(token_budget=64)


def test_several_names_stand_with_commas_between() -> None:
    text = "full,delta:full_layers=0,1,recent_pages=2,quest:full_layers=0,,streaming_llm,"
    assert [(one.name, one.settings) for one in parse(text)] == [
        ("full", ()),
        ("delta", (("full_layers", "0,1"), ("recent_pages", "2"))),
        ("quest", (("full_layers", "0"),)),
        ("streaming_llm", ()),
    ]
    for one in parse(text):
        assert parse(one.text) == [one]
    assert written("passkey", [("depth", "0.5")]) == "passkey:depth=0.5"


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("delta:", "'delta:' must be a name, or a name with settings"),
        ("delta:token_budget", "'delta:token_budget' must be a name, or"),
        (":token_budget=5", "':token_budget=5' must be a name, or"),
        ("delta:=5", "'delta:=5' must be a name, or"),
        ("delta,token_budget=5", "unknown policy 'delta,token_budget=5'"),
        ("delta:token_budget=5,quest", "names 2 methods; give one policy"),
        ("delta:token_budget=5:recent_pages=1", "delta:token_budget '5:recent_pages=1' must be a"),
        ("delta:token_budget=much", "delta:token_budget 'much' must be a whole number"),
        ("delta:full_layers=a", "delta:full_layers 'a' must be numbers such as 0,1"),
        ("quest:share_group=maybe", "quest:share_group 'maybe' must be true or false"),
        ("delta:budget=5", "unknown setting of policy delta 'budget'"),
        ("detla:token_budget=5", "unknown policy 'detla'; did you mean 'delta'?"),
        ("", "unknown policy ''"),
    ],
)
def test_what_cannot_be_read_is_said(text: str, says: str) -> None:
    with pytest.raises(ConfigError) as raised:
        make_policy(text)
    assert says in str(raised.value)


def test_a_setting_without_a_name_before_it_is_refused() -> None:
    with pytest.raises(ConfigError, match="'token_budget=5' must be a name"):
        parse("delta,token_budget=5")
