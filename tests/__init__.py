import pytest

pytest.register_assert_rewrite("tests.runner_contract")
