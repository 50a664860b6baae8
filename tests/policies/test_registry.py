from dataclasses import dataclass, field

import pytest

from smdlib.policies import (
    EvictionPolicy,
    PolicyError,
    StreamingPolicy,
    available_policies,
    make_policy,
    needs_tokens,
    query_window,
    register_policy,
    tracks_attention,
)
from smdlib.policies import registry as registry_module


class Newest:
    def score(self, view):
        return view.positions.float()


@pytest.fixture(autouse=True)
def registry(monkeypatch):
    """Names that a test registers are gone after it."""
    monkeypatch.setattr(registry_module, "_POLICIES", dict(registry_module._POLICIES))
    monkeypatch.setattr(registry_module, "_WRAPPERS", set(registry_module._WRAPPERS))


def test_builds_every_policy_of_its_own_by_name():
    names = ("h2o", "keydiff", "knorm", "lagkv", "random", "recent", "rkv", "snapkv", "streaming", "tova")
    assert set(names) <= set(available_policies())
    assert list(available_policies()) == sorted(available_policies())
    for name in names:
        policy = make_policy(name, **({"sinks": 4} if name == "recent" else {}))
        assert isinstance(policy, EvictionPolicy)
        assert policy == make_policy(name, **({"sinks": 4} if name == "recent" else {}))
        with pytest.raises(AttributeError):
            policy.seed = 1  # frozen


def test_options_reach_the_policy_and_a_ready_one_passes_through():
    policy = make_policy("streaming", sinks=7)
    assert policy == StreamingPolicy(sinks=7)
    assert make_policy(policy) is policy


def test_a_third_party_registers_its_own():
    @register_policy("mine")
    @dataclass(frozen=True)
    class Mine(Newest):
        strength: float = 1.0
        derived: int = field(default=0, init=False)

    assert make_policy("mine", strength=2.0) == Mine(strength=2.0)
    assert "mine" in available_policies()
    with pytest.raises(TypeError, match=r"policy 'mine' has no option derived, its options: strength$"):
        make_policy("mine", derived=1)


def test_unknown_name_lists_the_available_ones():
    message = r"unknown policy 'snapvk', available: h2o, .*snapkv, streaming, tova; wrappers: combined, protected$"
    with pytest.raises(ValueError, match=message):
        make_policy("snapvk")
    with pytest.raises(ValueError, match=message):
        make_policy("snapvk(window=3)")


def test_a_wrapper_is_built_by_name_but_is_no_policy_by_itself():
    @register_policy("mine", wraps=True)
    @dataclass(frozen=True)
    class Mine(Newest):
        policy: object
        more: int = 0

    assert "mine" not in available_policies()
    assert make_policy("mine(policy='snapkv')") == make_policy("mine", policy="snapkv") == Mine("snapkv")
    with pytest.raises(TypeError, match=r"policy 'mine' needs policy$"):
        make_policy("mine", more=1)


def test_options_in_the_text():
    assert make_policy("snapkv(window=16, kernel_size=5)") == make_policy("snapkv", window=16, kernel_size=5)
    assert make_policy("snapkv(window=16)", kernel_size=5) == make_policy("snapkv", window=16, kernel_size=5)
    assert make_policy(" streaming ( ) ") == StreamingPolicy()
    with pytest.raises(TypeError, match=r"policy 'snapkv\(window=16\)': option window is given in the text and as an"):
        make_policy("snapkv(window=16)", window=3)
    with pytest.raises(TypeError, match="policy 'snapkv' has no option size"):
        make_policy("snapkv(size=3)")
    with pytest.raises(TypeError, match=r"SnapKVPolicy.window is '16', expected an int"):
        make_policy("snapkv(window='16')")


def test_a_registered_name_is_taken_as_it_is():
    register_policy("odd (name)")(Newest)
    assert type(make_policy("odd (name)")) is Newest


def test_unknown_option_names_the_policy_and_its_options():
    with pytest.raises(
        TypeError, match="policy 'snapkv' has no option size, its options: window, kernel_size, pooling"
    ):
        make_policy("snapkv", size=3)
    register_policy("newest")(Newest)
    with pytest.raises(TypeError, match="policy 'newest' has no option size, its options: none"):
        make_policy("newest", size=3)


def test_a_taken_name_is_refused_but_the_same_class_may_come_again():
    register_policy("newest")(Newest)
    assert register_policy("newest")(Newest) is Newest
    again = type("Newest", (), {"score": Newest.score, "__module__": Newest.__module__})
    register_policy("newest")(again)  # as when a notebook cell runs twice
    assert type(make_policy("newest")) is again
    with pytest.raises(ValueError, match=r"policy 'streaming' is already smdlib.*StreamingPolicy: choose a free name"):
        register_policy("streaming")(Newest)
    assert type(make_policy("streaming")) is StreamingPolicy


@pytest.mark.parametrize("name", ["", None, Newest])
def test_a_name_is_a_string(name):
    with pytest.raises(TypeError, match="expected a string"):
        register_policy(name)


@pytest.mark.parametrize("cls", [int, Newest()])
def test_a_policy_is_a_class_with_score(cls):
    with pytest.raises(TypeError, match="policy 'x': expected a class with a method score"):
        register_policy("x")(cls)


def test_options_with_a_ready_policy_are_refused():
    with pytest.raises(TypeError, match="options sinks given with a ready StreamingPolicy"):
        make_policy(StreamingPolicy(), sinks=2)


@pytest.mark.parametrize("thing", [None, 3, StreamingPolicy])
def test_neither_name_nor_policy(thing):
    with pytest.raises(TypeError, match="expected a policy's name or an object with a method score"):
        make_policy(thing)


def test_optional_attributes_have_defaults_and_are_checked():
    policy = Newest()
    assert (query_window(policy), tracks_attention(policy), needs_tokens(policy)) == (0, False, False)
    for window in (-1, 2.0, True, None):
        policy.query_window = window
        with pytest.raises(PolicyError, match=f"Newest.query_window is {window}, expected a number of queries"):
            query_window(policy)
    policy.tracks_attention = 1
    with pytest.raises(PolicyError, match=r"Newest.tracks_attention is 1, expected True or False"):
        tracks_attention(policy)
    policy.needs_tokens = "yes"
    with pytest.raises(PolicyError, match=r"Newest.needs_tokens is 'yes', expected True or False"):
        needs_tokens(policy)
