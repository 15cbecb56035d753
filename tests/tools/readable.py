"""Checks on a drawn matplotlib figure whether it is readable."""

import itertools

import matplotlib
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.colors import to_rgb
from matplotlib.text import Text

LIGHT, DARK = "#ffffff", "#0d1117"
"""The backgrounds of pictures: white, and GitHub's dark theme."""


def complaints(figure, page=LIGHT):
    """What a reader would complain about, as a list of sentences.

    Panels that are too small or reach beyond the figure, labels that overlap, legends that hide data, numbers that hide
    a point, and text with too little contrast.
    """
    FigureCanvasAgg(figure).draw()
    return [
        *_small_panels(figure),
        *_outside(figure),
        *_collisions(figure),
        *_covered(figure),
        *_on_points(figure),
        *_faint(figure, page),
    ]


def _panels(figure):
    """All visible panels except colour bars."""
    shown = (axes for axes in figure.axes if axes.get_visible())
    return [axes for axes in shown if axes.get_subplotspec() is not None]


def _small_panels(figure):
    grids = [axes.get_subplotspec().get_gridspec() for axes in _panels(figure)]
    columns, rows = max(grid.ncols for grid in grids), max(grid.nrows for grid in grids)
    for axes in _panels(figure):
        box = axes.get_window_extent()
        share = box.width / figure.bbox.width, box.height / figure.bbox.height
        if share[0] < 2 / 3 / columns or share[1] < 1 / (2 * rows + 1):
            yield f"the panel {_name(axes)} has {share[0]:.0%} of the figure's width and {share[1]:.0%} of its height"


def _outside(figure):
    for axes in _panels(figure):
        box = axes.get_tightbbox()
        if box.x0 < -1 or box.y0 < -1 or box.x1 > figure.bbox.x1 + 1 or box.y1 > figure.bbox.y1 + 1:
            yield f"the panel {_name(axes)} reaches beyond the figure"


def _tick_labels(axis):
    """The tick labels within the limits of the axis; there may be others."""
    low, high = sorted(axis.get_view_interval())
    ticks = itertools.chain(axis.get_major_ticks(), axis.get_minor_ticks())
    shown = [tick.label1 for tick in ticks if low <= tick.get_loc() <= high]
    return [label for label in shown if label.get_visible() and label.get_text()]


def _collisions(figure):
    """Overlaps between tick labels, texts and titles of a panel."""
    for axes in _panels(figure):
        titles = [axes.xaxis.label, axes.yaxis.label, axes.title]
        ticks = [label for axis in (axes.xaxis, axes.yaxis) for label in _tick_labels(axis)] if axes.axison else []
        texts = [*ticks, *axes.texts, *(title for title in titles if title.get_text() and title.get_visible())]
        for a, b in itertools.combinations(texts, 2):
            if a.get_window_extent().overlaps(b.get_window_extent()):
                yield f"{a.get_text()!r} and {b.get_text()!r} of the panel {_name(axes)} overlap"


def _covered(figure):
    legends = [*figure.legends, *(axes.get_legend() for axes in figure.axes if axes.get_legend())]
    for legend, axes in itertools.product(legends, _panels(figure)):
        box = legend.get_window_extent()
        if not box.overlaps(axes.get_window_extent()):
            continue
        for artist in (*axes.lines, *axes.patches):
            path = artist.get_transform().transform_path(artist.get_path()).cleaned(remove_nans=True)
            if len(path.vertices) and path.intersects_bbox(box, filled=artist in axes.patches):
                yield f"a legend hides {artist.get_label()!r} of the panel {_name(axes)}"


def _on_points(figure):
    """Texts in a panel that hide a marker of a line."""
    for axes in _panels(figure):
        lines = [line for line in axes.lines if line.get_marker() not in ("", "None", None)]
        points = [point for line in lines for point in line.get_transform().transform(line.get_xydata())]
        for text in axes.texts:
            if any(text.get_window_extent().contains(*point) for point in points):
                yield f"{text.get_text()!r} hides a point of the panel {_name(axes)}"


def _faint(figure, page):
    for text in figure.findobj(Text):
        if text.get_visible() and text.get_text().strip() and _contrast(text.get_color(), page) < 3:
            yield f"{text.get_text()!r} is hardly visible on {page}"


def _contrast(a, b):
    """The contrast as WCAG defines it, from 1 (none) to 21 (black on white)."""

    def luminance(colour):
        parts = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in to_rgb(colour)]
        return 0.2126 * parts[0] + 0.7152 * parts[1] + 0.0722 * parts[2]

    dark, light = sorted((luminance(a), luminance(b)))
    return (light + 0.05) / (dark + 0.05)


def _name(axes):
    return repr(axes.get_title() or axes.get_ylabel() or axes.get_xlabel())


matplotlib.use("Agg")
