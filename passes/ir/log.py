"""The log of autopar."""

import logging

logger = logging.getLogger("autopar")
