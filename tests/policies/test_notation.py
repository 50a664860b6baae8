import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from smdlib.policies.notation import parse_policy


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("h2o", ("h2o", {})),
        ("h2o()", ("h2o", {})),
        ("  h2o ( recent = None )", ("h2o", {"recent": None})),
        ("my-policy.v2(a=1,)", ("my-policy.v2", {"a": 1})),
        (
            "p(a=-1.5, b='x)(', c=[1, (2, 3)], d={'k': True})",
            ("p", {"a": -1.5, "b": "x)(", "c": [1, (2, 3)], "d": {"k": True}}),
        ),
        ("protected(policy='snapkv(window=4)')", ("protected", {"policy": "snapkv(window=4)"})),
        ("p(a=1,\n  b=2  # of two\n)", ("p", {"a": 1, "b": 2})),
    ],
)
def test_reads(text, expected):
    assert parse_policy(text) == expected


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "expected a name, or a name with options in parentheses"),
        ("(window=1)", "expected a name, or"),
        ("snapkv(window=1", "expected a name, or"),
        ("snapkv window=1)", "expected a name, or"),
        ("snapkv(window=1) x", "expected a name, or"),
        ("snapkv(window=)", "cannot read its options .*expected name=value, separated by commas"),
        ("snapkv(window=1 kernel_size=3)", "cannot read its options"),
        ("snapkv(window=1)(2)", "expected one pair of parentheses around all options"),
        ("snapkv(16)", "16 has no name, expected option=value"),
        ("snapkv(*[1])", r"\*\[1\] has no name"),
        ("snapkv(**{'window': 1})", "{'window': 1} has no name"),
        ("snapkv(window=1, window=2)", "option window is given twice|cannot read its options"),
        ("snapkv(pooling=max)", r"option pooling is max, expected a literal \(strings in quotes\)"),
        ("snapkv(window=2**40)", r"option window is 2 \*\* 40, expected a literal"),
        ("snapkv(window=__import__('os').getpid())", "option window is __import__.*expected a literal"),
        ("snapkv(window={[]: 1})", "option window is .*expected a literal"),
        ("snapkv(window='\0')", "cannot read its options"),
        ("snapkv(window=" + "(" * 300 + ")" * 300 + ")", "cannot read its options"),
    ],
)
def test_says_what_is_wrong(text, message):
    with pytest.raises(ValueError, match=message) as caught:
        parse_policy(text)
    assert repr(text) in str(caught.value)


LITERALS = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner) | st.tuples(inner, inner) | st.dictionaries(st.text(), inner),
    max_leaves=4,
)


@settings(max_examples=50, deadline=None)
@given(st.dictionaries(st.sampled_from(["a", "window", "x_1"]), LITERALS))
def test_reads_back_what_repr_writes(options):
    text = "name({})".format(", ".join(f"{key}={value!r}" for key, value in options.items()))
    assert parse_policy(text) == ("name", options)
