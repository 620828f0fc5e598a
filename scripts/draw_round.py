"""Draws the picture of a round in the README: docs/images/round.svg.

Example: python scripts/draw_round.py
"""

from pathlib import Path

__all__ = ["draw_picture", "main"]

ROOT = Path(__file__).resolve().parent.parent
GRID, CELL = 6, 13
DEVICES = (
    ("laptop", "ONNX Runtime", 5, "limited by its link"),
    ("phone", "ExecuTorch", 4, "limited by its link"),
    ("Raspberry Pi", "ONNX Runtime", 3, "limited by memory"),
)
ROWS = (92, 206, 320)
STEPS = (
    (20, "1  Measure", "free memory and link, now"),
    (232, "2  Assign", "the largest submodel that fits"),
    (452, "3  Train", "on the device's own data"),
    (690, "4  Aggregate", "each weight over its clients"),
)
STYLE = """
text { font: 14px system-ui, sans-serif; fill: #1f2328 }
.small { font-size: 12px; fill: #59636e }
.step { font-size: 17px; font-weight: 600 }
.page { fill: #ffffff; stroke: #d1d9e0 }
.empty { fill: #eaeef2; stroke: #d1d9e0 }
.one { fill: #9ecbff; stroke: #ffffff }
.two { fill: #4a9cf0; stroke: #ffffff }
.three { fill: #0b5cad; stroke: #ffffff }
.line { stroke: #59636e; stroke-width: 1.6; fill: none }
.tip { fill: #59636e }
@media (prefers-color-scheme: dark) {
  text { fill: #f0f6fc } .small { fill: #9198a1 }
  .page { fill: #0d1117; stroke: #3d444d } .empty { fill: #21262d; stroke: #3d444d }
  .one { fill: #1f4b7f; stroke: #0d1117 } .two { fill: #2f81d8; stroke: #0d1117 }
  .three { fill: #a5d3ff; stroke: #0d1117 }
  .line { stroke: #9198a1 } .tip { fill: #9198a1 }
}
"""


def main() -> None:
    """Write the picture."""
    (ROOT / "docs" / "images" / "round.svg").write_text(draw_picture(), encoding="utf-8")


def draw_picture() -> str:
    """Draw the picture as SVG, in colours for light and dark pages."""
    parts = [
        '<rect class="page" x="1" y="1" width="918" height="432" rx="10"/>',
        '<marker id="tip" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" markerHeight="7" orient="auto">',
        '<path class="tip" d="M0 0 8 4 0 8z"/></marker>',
    ]
    for x, title, subtitle in STEPS:
        parts += [_draw_text(x, 34, title, "step"), _draw_text(x, 54, subtitle, "small")]
    for y, (name, runtime, size, limit) in zip(ROWS, DEVICES, strict=True):
        parts += [_draw_text(20, y + 26, name), _draw_bar(20, y + 36, size), _draw_text(20, y + 66, limit, "small")]
        parts += [_draw_arrow(160, y + 39, 224), _draw_grid(250, y, (size,))]
        parts += [
            _draw_arrow(350, y + 39, 440),
            _draw_text(452, y + 36, runtime),
            _draw_text(452, y + 54, "a cached program", "small"),
        ]
        parts += [f'<path class="line" marker-end="url(#tip)" d="M572 {y + 39}H620Q640 {y + 39} 690 {ROWS[1] + 39}"/>']
    parts += [_draw_grid(720, ROWS[1] - 20, tuple(size for _, _, size, _ in DEVICES), 20)]
    notes = ("Stronger colour: more clients.", "What no client trained", "keeps its exact bits.")
    parts += [_draw_text(700, ROWS[1] + 128 + 17 * number, note, "small") for number, note in enumerate(notes)]
    parts += [
        '<path class="line" stroke-dasharray="5 4" marker-end="url(#tip)" d="M780 396V414H60V400"/>',
        '<rect class="page" x="372" y="404" width="96" height="20" stroke="none" style="stroke:none"/>',
        _draw_text(384, 419, "next round", "small"),
    ]
    body = "\n".join(parts)
    label = "A round: measure, assign, train, aggregate"
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 920 434" role="img" aria-label="{label}">'
    return f"{head}<style>{STYLE}</style>\n{body}\n</svg>\n"


def _draw_text(x: int, y: int, text: str, kind: str = "") -> str:
    return f'<text class="{kind}" x="{x}" y="{y}">{text}</text>'


def _draw_arrow(x: int, y: int, end: int) -> str:
    return f'<path class="line" marker-end="url(#tip)" d="M{x} {y}H{end}"/>'


def _draw_bar(x: int, y: int, size: int) -> str:
    """Draw a device's budget as part of the whole model's cost."""
    width = 120
    return (
        f'<rect class="empty" x="{x}" y="{y}" width="{width}" height="12" rx="3"/>'
        f'<rect class="two" x="{x}" y="{y}" width="{width * size // GRID}" height="12" rx="3"/>'
    )


def _draw_grid(x: int, y: int, widths: tuple[int, ...], cell: int = CELL) -> str:
    """Draw a model as a grid of weights, coloured by the number of submodels of these widths that contain them."""
    kinds = ("empty", "one", "two", "three")
    return "".join(
        f'<rect class="{kinds[sum(max(row, column) < width for width in widths)]}" x="{x + column * cell}" '
        f'y="{y + row * cell}" width="{cell}" height="{cell}" rx="2"/>'
        for row in range(GRID)
        for column in range(GRID)
    )


if __name__ == "__main__":
    main()
