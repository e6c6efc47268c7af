"""Imported by each Python that has this folder on its path, at its start: a gateway's answers are written for tests."""

import os
import sys
from pathlib import Path

if sys.orig_argv[1:] == ["-m", "services.gateway"]:
    from tests.answer_files import FOLDER_VARIABLE, AnswerWriter
    from tests.answer_tap import watch_gateways

    watch_gateways(AnswerWriter(Path(os.environ[FOLDER_VARIABLE])).take)
