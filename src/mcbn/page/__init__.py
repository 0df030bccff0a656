"""One HTML file that shows whether a prediction's uncertainty can be trusted."""

from mcbn.page.write import write_page, write_prediction_page

__all__ = ["write_page", "write_prediction_page"]
