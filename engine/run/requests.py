"""Requests to save or to stop, agreed by all ranks."""

from engine.parallel.distributed import Agreement, World
from engine.signals import Request, Requests


class StopRequested(Exception):
    """All ranks agreed to stop, on `request`."""

    def __init__(self, request: Request):
        super().__init__(request)
        self.request = request


class AgreedRequests(Requests):
    """Context manager that records signals as requests, on which all ranks agree.

    Attributes:
        save: whether a save was requested.
    """

    def __init__(self, world: World):
        super().__init__()
        self.agreement, self.save = Agreement(world), False

    def check(self) -> None:
        """Notes a request to save; raises `StopRequested` on every rank at the same point of the run if one
        of them was asked to stop. Every rank must call it equally often.
        """
        agreed = Request(self.agreement(self.take()))
        if agreed > Request.SAVE:
            raise StopRequested(agreed)
        self.save = self.save or agreed == Request.SAVE

    def finish(self) -> None:
        """Ends the agreement in progress."""
        self.agreement.finish()
