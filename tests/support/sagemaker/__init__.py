"""A SageMaker for tests: the training-job API on 127.0.0.1, whose jobs are real processes of this machine.

No stand-in that exists runs a job. This one validates what botocore's model and the documentation state, authorises
callers and execution roles by the policies that an emulator stores, and runs each job's container as a process.
"""

from tests.support.sagemaker.callers import Callers
from tests.support.sagemaker.emulator import Emulator
from tests.support.sagemaker.errors import ApiError
from tests.support.sagemaker.faults import Faults
from tests.support.sagemaker.server import SageMakerServer
from tests.support.sagemaker.service import Service, Timing

__all__ = ["ApiError", "Callers", "Emulator", "Faults", "SageMakerServer", "Service", "Timing"]
