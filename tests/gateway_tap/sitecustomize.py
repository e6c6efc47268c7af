"""Imported by each Python that has this folder on its path, at its start: a gateway writes its answers for tests, and
a worker has the faults that a test switches."""

import os
import sys
from pathlib import Path

if sys.orig_argv[1:] == ["-m", "services.gateway"]:
    from tests.answer_files import FOLDER_VARIABLE, AnswerWriter
    from tests.answer_tap import watch_gateways

    watch_gateways(AnswerWriter(Path(os.environ[FOLDER_VARIABLE])).take)
elif "FAULTS_FOLDER" in os.environ and sys.orig_argv[1:] in (["-m", "services.prefill"], ["-m", "services.decode"]):
    from tests.fault_switch import install, install_in_decode

    install(Path(os.environ["FAULTS_FOLDER"]))
    if sys.orig_argv[2] == "services.decode":
        install_in_decode(Path(os.environ["FAULTS_FOLDER"]))
