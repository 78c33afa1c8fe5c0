# Copyright 2026 The deltalatent authors.
# SPDX-License-Identifier: Apache-2.0
"""The pages on architecture and configuration: snippets run and print what is shown, every field is described."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest
import torch

from deltalatent import KimiK3Config, KimiK3TextConfig, KimiK3VisionConfig, size_config
from deltalatent.__main__ import main
from deltalatent.configuration.configuration_kimi_k3 import FIELDS_OF_THIS_ARCHITECTURE, KDA_IMPLEMENTATIONS
from tests.documentation import BLOCK, run_blocks
from tests.testing_common import linear_attn_config

DOCS = Path(__file__).parents[2] / "docs"
PAGES = ("architecture.md", "configuration.md", "vision.md")


def text(page: str) -> str:
    return (DOCS / page).read_text()


def run_shell(line: str) -> None:
    """`python -m deltalatent ...` in this process; a test of the sizes starts it as a process of its own."""
    prefix, arguments = shlex.split(line)[:3], shlex.split(line)[3:]
    assert prefix == ["python", "-m", "deltalatent"], line
    main(arguments)


@pytest.mark.parametrize("page", PAGES)
def test_snippets_run_and_print_what_is_shown(page: str) -> None:
    assert "python" in run_blocks(DOCS / page, run_shell)


@pytest.mark.parametrize("page", PAGES)
def test_links_lead_somewhere(page: str) -> None:
    targets = re.findall(r"\]\(([^)#]+?)\)", BLOCK.sub("", text(page)))
    assert [target for target in targets if not target.startswith("http") and not (DOCS / target).exists()] == []


def rows_under(heading: str) -> list[list[str]]:
    """Cells of the first table under a heading of configuration.md, without its two header lines."""
    section = text("configuration.md").split(f"{heading}\n", 1)[1]
    table = re.search(r"(?:^\|.*\n)+", section, re.MULTILINE)
    assert table is not None
    return [[cell.strip() for cell in line.strip("|\n").split(" | ")] for line in table[0].splitlines()[2:]]


@pytest.mark.parametrize(
    ("heading", "config_class"),
    [("## Fields of the text model", KimiK3TextConfig), ("## Fields of the composite", KimiK3Config)],
    ids=["text", "composite"],
)
def test_every_field_is_described_with_its_default(heading: str, config_class: type) -> None:
    described = {name.strip("`"): default.strip("`") for name, default, _ in rows_under(heading)}
    own_fields = [name for name in config_class.__annotations__ if name in config_class.__dataclass_fields__]
    defaults = {name: config_class.__dataclass_fields__[name].default for name in own_fields}
    assert described == {name: repr(value).replace("'", '"') for name, value in defaults.items()}


def test_every_key_of_the_kda_block_is_described() -> None:
    described = {name for cells in rows_under("### `linear_attn_config`") for name in re.findall(r"`(\w+)`", cells[0])}
    assert described == set(linear_attn_config())


def test_fields_that_decide_the_architecture_are_listed() -> None:
    section = text("configuration.md").split("## Classes and files")[1].split("## Errors")[0]
    for field in FIELDS_OF_THIS_ARCHITECTURE:
        assert f"`{field.rpartition('.')[2]}`" in section


def test_classes_and_their_types() -> None:
    for name, model_type, _ in rows_under("## Classes and files"):
        config_class = {c.__name__: c for c in (KimiK3Config, KimiK3TextConfig, KimiK3VisionConfig)}[name.strip("`")]
        assert model_type.startswith(f"`{config_class.model_type}`")
    for implementation in KDA_IMPLEMENTATIONS:
        assert f'`"{implementation}"`' in text("configuration.md")


def test_parameter_table_adds_up_at_the_released_size() -> None:
    """The figures in the table of architecture.md are sums over tensors of a model on the meta device."""
    from deltalatent import KimiK3ForCausalLM

    config = size_config("release", num_hidden_layers=4)
    with torch.device("meta"):
        model = KimiK3ForCausalLM(config)

    def count(layer: int, pattern: str) -> int:
        named = model.model.layers[layer].named_parameters()
        return sum(parameter.numel() for name, parameter in named if re.search(pattern, name))

    experts = count(1, r"\.experts\.")
    expected = {
        "KDA": f"{count(0, 'self_attn') / 1e6:.0f} M",
        "MLA": f"{count(3, 'self_attn') / 1e6:.0f} M",
        "dense MLP": f"{count(0, r'^mlp[.]') / 1e6:.0f} M",
        "router and latent projections": f"{count(1, r'mlp[.](gate[.]|routed)') / 1e6:.0f} M",
        "shared experts": f"{count(1, 'shared_experts') / 1e6:.0f} M",
        "routed experts": f"{experts / 1e9:.1f} G, {experts * 16 / 896 / 1e6:.0f} M active",
        "norms and depth mixing": f"{count(0, 'layernorm|_res_') / 1e3:.0f} k",
    }
    section = text("architecture.md").split("## Parameters")[1]
    for part, figure in expected.items():
        row = next(line for line in section.splitlines() if line.startswith(f"| {part} |"))
        assert row.endswith(f"| {figure} |"), (row, figure)
