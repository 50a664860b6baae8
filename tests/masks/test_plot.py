"""The picture says of every key whether it left with the prompt, while decoding, or never."""

import pytest
import torch

from smdlib import NEVER, ShadowMask

pytest.importorskip("matplotlib")

from matplotlib.colors import to_hex

FROM_PROMPT, WHILE_DECODING, KEPT = 0, 1, 2


@pytest.fixture
def mask():
    """Two rows of 6 tokens, 2 layers, 2 KV heads; the prompt of the first row is its first 3 tokens."""
    evicted_at = torch.full((2, 6, 2, 2), NEVER, dtype=torch.int32)
    evicted_at[0, 0, 0, 0] = 3  # gone with the prompt
    evicted_at[0, 1, 0, 0] = 4  # gone at the first decoded token
    evicted_at[0, 4, 1, 1] = 5
    evicted_at[0, 2, 1, 0] = 6  # after the last query: as good as kept
    evicted_at[1, 5, 1, 0] = 6
    evicted_at[1, 0, 0, 1] = 2
    return ShadowMask(evicted_at=evicted_at, batch_size=[2])


def image(figure):
    return figure.axes[0].images[0]


def test_one_line_per_layer_and_head(mask):
    figure = mask.plot(prompt_length=3)
    expected = torch.full((4, 6), KEPT)  # lines: layer 0 head 0, layer 0 head 1, layer 1 head 0, layer 1 head 1
    expected[0, 0], expected[0, 1], expected[3, 4] = FROM_PROMPT, WHILE_DECODING, WHILE_DECODING
    assert image(figure).get_array().tolist() == expected.tolist()


def test_without_a_border_every_eviction_is_one_kind(mask):
    states = image(mask.plot()).get_array()
    assert (states[0, 0], states[0, 1], states[3, 4], states[1, 1]) == (FROM_PROMPT, FROM_PROMPT, FROM_PROMPT, KEPT)


def test_a_row_a_length_and_a_mask_without_batch(mask):
    assert image(mask.plot(row=1)).get_array()[1, 0] == FROM_PROMPT
    short = image(mask.plot(length=4, prompt_length=3)).get_array()
    assert short.shape == (4, 4)
    assert short[0].tolist() == [FROM_PROMPT, KEPT, KEPT, KEPT]  # at query 4 there is no query any more
    assert image(mask[1].plot()).get_array().tolist() == image(mask.plot(row=1)).get_array().tolist()


def test_three_colours_and_their_names(mask):
    figure = mask.plot(prompt_length=3)
    picture = image(figure)
    colours = [to_hex(picture.cmap(picture.norm(state))) for state in (FROM_PROMPT, WHILE_DECODING, KEPT)]
    assert colours == ["#e8e6e1", "#e0a458", "#264653"]
    names = [label.get_text().replace("\n", " ") for label in figure.axes[1].get_yticklabels()]
    assert names == ["evicted from prompt", "evicted while decoding", "kept"]


def test_axes_name_tokens_and_layers(mask):
    axes = mask.plot(prompt_length=3, title="A title").axes[0]
    assert axes.get_title() == "A title"
    assert [label.get_text() for label in axes.get_yticklabels()] == ["0", "1"]
    assert axes.get_yticks().tolist() == [0.5, 2.5]
    assert axes.get_ylabel() == "layer (one line per KV head, 2 each)"
    assert axes.lines[0].get_xdata()[0] == 2.5
    assert not mask.plot().axes[0].lines


def test_it_is_saved_where_asked(mask, tmp_path):
    mask.plot(path=tmp_path / "kept.png")
    assert (tmp_path / "kept.png").read_bytes().startswith(b"\x89PNG")
