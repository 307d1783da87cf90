"""Workers: abandoned operations are finished or reported, and stores are swept."""

from retrysafe.workers.duties import WorkerPolicy
from retrysafe.workers.worker import AsyncWorker, Worker

__all__ = ["AsyncWorker", "Worker", "WorkerPolicy"]
