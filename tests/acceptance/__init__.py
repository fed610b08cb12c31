"""Cases on real processes."""

import pytest

# Its assertions are to show what they compared, as those of test modules do.
pytest.register_assert_rewrite("tests.acceptance.ledger")
