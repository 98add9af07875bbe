"""Draw the figures of docs/concepts.md and docs/architecture.md as SVG files.

    python docs/drawings.py

A figure is a white card with dark text, so that it reads the same on light and dark pages. A test compares the files
with what this script draws.
"""

from __future__ import annotations

import ast
from html import escape
from pathlib import Path

OUT = Path(__file__).parent / "img"
PACKAGE = Path(__file__).parent.parent / "hf_offload"
INK, FRAME, QUIET = "#1f2933", "#9aa5b1", "#f3f5f7"
DEVICE, HOST, MODEL = "#b2dfdb", "#ffd9a8", "#d6dcf5"


class Drawing:
    """SVG elements in the order in which they are painted."""

    def __init__(self, width: int, height: int, title: str) -> None:
        self.parts = [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}" '
            f'role="img" font-family="DejaVu Sans, Verdana, sans-serif" font-size="13" fill="{INK}">',
            f"<title>{escape(title)}</title>",
            '<defs><marker id="tip" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" markerHeight="7" orient="auto">'
            f'<path d="M0 0 L8 4 L0 8 z" fill="{INK}"/></marker></defs>',
            f'<rect x="0.5" y="0.5" width="{width - 1}" height="{height - 1}" rx="8" fill="white" stroke="{FRAME}"/>',
        ]

    def text(self, x: float, y: float, words: str, *, anchor: str = "middle", bold: bool = False) -> None:
        """Lines of text, the first one's baseline at y."""
        weight = ' font-weight="bold"' if bold else ""
        for row, line in enumerate(words.split("\n")):
            self.parts.append(f'<text x="{x}" y="{y + 17 * row}" text-anchor="{anchor}"{weight}>{escape(line)}</text>')

    def box(self, x: float, y: float, width: float, height: float, words: str = "", fill: str = QUIET) -> None:
        """A rectangle with text in its middle."""
        self.parts.append(
            f'<rect x="{x}" y="{y}" width="{width}" height="{height}" rx="5" fill="{fill}" stroke="{FRAME}"/>'
        )
        if words:
            lines = words.count("\n") + 1
            self.text(x + width / 2, y + height / 2 + 4.5 - 8.5 * (lines - 1), words)

    def panel(self, x: float, y: float, width: float, height: float, title: str) -> None:
        """A frame with a title at its upper left."""
        self.box(x, y, width, height, fill="none")
        self.text(x + 12, y + 22, title, anchor="start", bold=True)

    def arrow(self, *points: tuple[float, float], dashed: bool = False) -> None:
        """A line through points with a tip at its end."""
        path = " L".join(f"{x} {y}" for x, y in points)
        dash = ' stroke-dasharray="5 4"' if dashed else ""
        self.parts.append(
            f'<path d="M{path}" fill="none" stroke="{INK}" stroke-width="1.4"{dash} marker-end="url(#tip)"/>'
        )

    def __str__(self) -> str:
        return "\n".join([*self.parts, "</svg>\n"])


def two_memories() -> Drawing:
    """Where keys, values and digests lie."""
    d = Drawing(
        760, 300, "Two memories: the device holds digests and a few resident blocks, the host holds every block"
    )
    d.panel(20, 20, 295, 226, "Device memory")
    d.text(34, 72, "digests: a small summary of each block", anchor="start")
    for index in range(9):
        d.box(34 + index * 30, 82, 26, 12, fill=DEVICE)
    d.text(34, 132, "resident blocks: sinks, newest, chosen", anchor="start")
    for place, number in enumerate((0, 3, 4, 7, 8)):
        d.box(34 + place * 30, 142, 26, 26, str(number), DEVICE)
    d.box(34 + 5 * 30 + 12, 142, 40, 26, "9 …", MODEL)
    d.text(34, 205, "Block 9 is open: it takes new tokens", anchor="start")
    d.text(34, 222, "and is sealed when it is full.", anchor="start")

    d.panel(445, 20, 295, 226, "Host memory")
    d.text(459, 72, "every sealed block: keys and values", anchor="start")
    for index in range(9):
        d.box(459 + index * 30, 82, 26, 26, str(index), HOST)
    d.text(459, 141, "The CPU attends chosen blocks here,", anchor="start")
    d.text(459, 158, "without copying them to the device.", anchor="start")
    d.text(459, 205, "Keys and values keep the model's dtype,", anchor="start")
    d.text(459, 222, 'or int8 with host_dtype="int8".', anchor="start")

    d.text(380, 140, "recall: blocks\nthat queries want")
    d.arrow((445, 168), (315, 168))
    d.text(380, 205, "sealed blocks")
    d.arrow((315, 215), (445, 215))
    d.text(380, 276, "Without a GPU there is one memory. It holds all blocks and digests, and nothing is copied.")
    return d


def decode_step() -> Drawing:
    """One layer in a decode step with two memories."""
    d = Drawing(760, 330, "A decode step of one layer: score digests, choose blocks, attend on device and CPU, merge")
    d.box(20, 24, 120, 46, "new token's\nk, v", MODEL)
    d.arrow((140, 47), (180, 47))
    d.box(180, 24, 130, 46, "open block", DEVICE)

    d.box(20, 142, 120, 46, "query q", MODEL)
    d.arrow((140, 165), (180, 165))
    d.box(180, 142, 130, 46, "score digests\nwith q", DEVICE)
    d.arrow((310, 165), (345, 165))
    d.box(345, 142, 110, 46, "choose blocks\nin the budget", DEVICE)
    d.arrow((400, 142), (400, 103), (495, 103))
    d.arrow((400, 188), (400, 232), (495, 232))
    d.text(392, 98, "resident", anchor="end")
    d.text(392, 243, "not resident", anchor="end")
    d.box(495, 80, 130, 46, "device attends\nresident blocks", DEVICE)
    d.box(495, 209, 130, 46, "CPU attends them\nin host memory", HOST)
    d.arrow((310, 47), (560, 47), (560, 80))
    d.arrow((625, 103), (680, 103), (680, 142))
    d.arrow((625, 232), (680, 232), (680, 188))
    d.text(688, 122, "out, lse", anchor="start")
    d.text(688, 216, "out, lse", anchor="start")
    d.box(635, 142, 105, 46, "merge by\nlog-sum-exp", MODEL)
    d.box(20, 282, 18, 18, fill=MODEL)
    d.text(46, 296, "the layer", anchor="start")
    d.box(150, 282, 18, 18, fill=DEVICE)
    d.text(176, 296, "device", anchor="start")
    d.box(260, 282, 18, 18, fill=HOST)
    d.text(286, 296, "CPU", anchor="start")
    d.text(740, 296, "Merged, it is attention over all chosen blocks.", anchor="end")
    return d


def layer_ahead() -> Drawing:
    """How the CPU starts one layer early."""
    d = Drawing(760, 296, "Layer-ahead: while the device runs layer i, the CPU already attends for layer i+1")
    d.text(24, 74, "device", anchor="start", bold=True)
    d.text(24, 204, "CPU", anchor="start", bold=True)
    for x, name, ahead in ((90, "layer i", "i+1"), (410, "layer i+1", "i+2")):
        d.text(x + 150, 36, name, bold=True)
        d.box(x, 46, 92, 46, f"predict q̂\nfor {ahead}", MODEL)
        d.box(x + 94, 46, 92, 46, "attend\nresident", DEVICE)
        d.box(x + 188, 46, 56, 46, "merge", MODEL)
        d.box(x + 246, 46, 60, 46, "MLP", QUIET)
    d.box(136, 176, 490, 46, "attend layer i+1's chosen blocks that are not resident, with q̂", HOST)
    d.box(634, 176, 82, 46, "i+2 …", HOST)
    d.arrow((136, 92), (136, 176))
    d.text(144, 138, "q̂ and the numbers of the blocks", anchor="start")
    d.arrow((618, 176), (618, 92))
    d.text(610, 138, "out, lse, k̄", anchor="end")
    d.text(
        24,
        256,
        "q̂ is layer i+1's query, computed from layer i's input. When the real query q is known, the",
        anchor="start",
    )
    d.text(
        24,
        274,
        "CPU's part is corrected to first order in q − q̂ with k̄, the weighted mean of the keys it attended.",
        anchor="start",
    )
    return d


def imports_of(path: Path) -> dict[str, bool]:
    """Modules of the package that a file imports, as paths without suffix, and whether for type checkers alone."""
    found: dict[str, bool] = {}

    def visit(node: ast.AST, types: bool) -> None:
        types = types or (isinstance(node, ast.If) and getattr(node.test, "id", "") == "TYPE_CHECKING")
        if isinstance(node, ast.ImportFrom):
            lead = path.relative_to(PACKAGE).parts[: -node.level] if node.level else ()
            module = node.module or ""
            if node.level or module.startswith("hf_offload"):
                parts = [*lead, *module.removeprefix("hf_offload").strip(".").split(".")]
                for alias in node.names:
                    name = "/".join(part for part in (*parts, alias.name) if part)
                    if not (PACKAGE / f"{name}.py").exists():
                        name = "/".join(part for part in parts if part)
                    found[name] = types and found.get(name, True)
        elif isinstance(node, ast.Import):
            for alias in node.names:
                if alias.name.split(".")[0] == "hf_offload":
                    name = "/".join(alias.name.split(".")[1:])
                    found[name] = types and found.get(name, True)
        for child in ast.iter_child_nodes(node):
            visit(child, types)

    visit(ast.parse(path.read_text(encoding="utf-8")), False)
    return found


BOXES = {
    "ways in": (300, 20, 440, 46, "enable  cli  lm_eval  fast_linear  ·  serving  ·  tools"),
    "hybrid_cache": (20, 20, 240, 46, "hybrid_cache"),
    "policies": (20, 122, 240, 46, "policies: registry, baselines"),
    "policies/hgca": (300, 122, 200, 46, "policies/hgca"),
    "policies/fluxion": (540, 122, 200, 46, "policies/fluxion"),
    "attention": (300, 224, 260, 46, "attention  ·  model  ·  graph"),
    "files": (600, 224, 140, 46, "files"),
    "policies/base": (20, 326, 240, 46, "policies/base: the contract"),
    "cache": (300, 326, 440, 46, "cache"),
    "blocks": (300, 428, 440, 46, "blocks"),
    "cpu": (300, 530, 200, 46, "cpu"),
    "gpu": (540, 530, 200, 46, "gpu"),
}
"""Where packages are drawn: x, y, width, height, text. What imports is above what it imports."""
OPEN_TO_ALL = {"fields", "knobs", "scores"}
TOGETHER = {"model": "attention", "graph": "attention"}
"""Rooms that are drawn in another's box."""


def box_of(module: str) -> str | None:
    """The box of a module; None: a module that all may import."""
    parts = module.split("/")
    if parts[0] in OPEN_TO_ALL or module in ("", "__init__"):
        return None
    if "/".join(parts[:2]) in BOXES:
        return "/".join(parts[:2])
    room = TOGETHER.get(parts[0], parts[0])
    return room if room in BOXES else "ways in"


def arrows() -> dict[tuple[str, str], bool]:
    """Which package imports which, and whether for type checkers alone."""
    found: dict[tuple[str, str], bool] = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        source = box_of(str(path.relative_to(PACKAGE).with_suffix("")))
        for module, types in imports_of(path).items():
            target = box_of(module)
            if source and target and source != target:
                found[source, target] = types and found.get((source, target), True)
    return found


def reduced(found: dict[tuple[str, str], bool]) -> dict[tuple[str, str], bool]:
    """Without the arrows that follow from others; the contract's own stay."""
    below: dict[str, set[str]] = {name: set() for name in BOXES}
    for source, target in found:
        if source != "policies/base":
            below[source].add(target)

    def reached(name: str) -> set[str]:
        return below[name].union(*map(reached, below[name]))

    return {
        (source, target): types
        for (source, target), types in found.items()
        if source == "policies/base" or not any(target in reached(other) for other in below[source] - {target})
    }


def packages() -> Drawing:
    """The packages and who imports whom, read from the imports."""
    d = Drawing(760, 662, "Who imports whom: from hybrid_cache and the policies down to cpu and gpu")
    fills = {"policies": MODEL, "policies/hgca": MODEL, "policies/fluxion": MODEL, "policies/base": MODEL}
    fills |= {"cache": HOST, "blocks": HOST, "files": HOST, "cpu": HOST, "attention": DEVICE, "gpu": DEVICE}
    found = sorted(reduced(arrows()).items())
    places: dict[tuple[str, str], list[tuple[str, str]]] = {}  # by box and side, who meets it there
    for (source, target), _ in found:
        above = BOXES[source][1] < BOXES[target][1]
        level = BOXES[source][1] == BOXES[target][1]
        right = BOXES[source][0] < BOXES[target][0]
        sides = ("right", "left") if level and right else ("left", "right") if level else ("low", "top")
        for box, side in (
            (source, sides[0] if level or above else "top"),
            (target, sides[1] if level or above else "low"),
        ):
            places.setdefault((box, side), []).append((source, target))

    def end(box: str, side: str, arrow: tuple[str, str]) -> tuple[float, float]:
        x, y, width, height, _ = BOXES[box]
        other = {a: BOXES[a[0] if a[1] == box else a[1]] for a in places[box, side]}
        order = sorted(places[box, side], key=lambda a: (other[a][0] + other[a][2] / 2, other[a][1]))
        share = (order.index(arrow) + 1) / (len(order) + 1)
        if side in ("left", "right"):
            return x + (width if side == "right" else 0), round(y + height * share, 1)
        return round(x + width * share, 1), y + (height if side == "low" else 0)

    for arrow, types in found:
        ends = [
            next(end(box, side, arrow) for (box, side), met in places.items() if box == name and arrow in met)
            for name in arrow
        ]
        (x0, y0), (x1, _) = ends
        if any(y < y0 < y + height and x0 < x < x1 for x, y, width, height, _ in BOXES.values() if x != x1):
            over = BOXES[arrow[0]][1] - 24  # another box lies between
            ends = [(x0 - 20, over + 24), (x0 - 20, over), (x1 + 100, over), (x1 + 100, over + 24)]
        d.arrow(*ends, dashed=types)
    for name, (x, y, width, height, words) in BOXES.items():
        d.box(x, y, width, height, words, fills.get(name, QUIET))
    d.text(
        20, 616, "Arrows that follow from others are left out. All may import fields, knobs and scores.", anchor="start"
    )
    d.text(
        20,
        638,
        "Dashed: for type checkers alone. The contract names the step and the layer of a policy.",
        anchor="start",
    )
    return d


DRAWINGS = {"packages": packages, "two-memories": two_memories, "decode-step": decode_step, "layer-ahead": layer_ahead}

if __name__ == "__main__":
    OUT.mkdir(exist_ok=True)
    for name, draw in DRAWINGS.items():
        (OUT / f"{name}.svg").write_text(str(draw()), encoding="utf-8")
