"""For processes that tests start: `pytest --unlike-rows` puts this folder on their path."""

import unlike_rows

unlike_rows.install()
