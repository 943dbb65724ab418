"""What is no override."""

import pytest

from rollwright.config.overrides import parse_override
from rollwright.errors import ConfigError


@pytest.mark.parametrize("text", ["novalue", "=3", "a..b=1"])
def test_overrides_that_are_none(text):
    with pytest.raises(ConfigError, match="key=value"):
        parse_override(text)
