"""The playground's page: two charts, sliders and buttons; playground.js brings them to life."""

from mcbn.page.html import Markup, element
from mcbn_study.playground.learner import Settings


def body(settings: Settings) -> Markup:
    """Lay out the page."""
    how = (
        "Click a chart to add a point, click a point to remove it. The batch-normalised network goes on learning; the"
        " bands are its 50 % and 95 % intervals. First MCBN, whose uncertainty depends on the input; then its twin"
        " with the same mean and one constant uncertainty."
    )
    charts = element("div", _chart("mcbn", "MCBN"), _chart("twin", "Constant uncertainty"), class_="pair")
    return element("div", element("p", how), charts, _controls(settings), _status())


def _chart(name: str, title: str) -> Markup:
    caption = element("figcaption", element("strong", title))
    return element("figure", caption, element("div", id=f"chart-{name}", class_="canvas"))


def _controls(settings: Settings) -> Markup:
    tune = element("label", element("input", type="checkbox", id="tune", checked=True), " tune tau on the points")
    buttons = [element("button", text, type="button", id=name) for name, text in _BUTTONS.items()]
    return element(
        "div",
        _slider("batch-size", "M, batch size", "2", "64", "1", str(settings.batch_size)),
        _slider("n-samples", "T, draws", "2", "300", "1", str(settings.n_samples)),
        _slider("tau", "tau, noise precision (log scale)", "-1", "4", "0.05", "2", tune),
        _form(),
        element("div", *buttons, class_="buttons"),
        class_="controls",
    )


def _form() -> Markup:
    """Add a point without a mouse."""
    fields = [
        element("label", f"{name} ", element("input", type="number", id=f"new-{name}", step="0.1", value="0"))
        for name in ("x", "y")
    ]
    return element("div", *fields, element("button", "Add point", type="button", id="add"), class_="buttons")


_BUTTONS = {"restart": "New network", "clear": "Remove all points", "toy": "Toy points"}


def _slider(name: str, label: str, low: str, high: str, step: str, value: str, *more: Markup) -> Markup:
    shown = element("output", value, id=f"{name}-value", for_=name)
    slider = element("input", type="range", id=name, min=low, max=high, step=step, value=value)
    return element("div", element("label", f"{label}: ", shown, for_=name), slider, *more)


def _status() -> Markup:
    return element("p", "connecting", id="status", role="status", class_="muted")
