"""Attempts fence: every receiver drops what belongs to an older attempt of the same request."""

from __future__ import annotations

import msgspec

from shared.contracts.ids import Dispatch, Epoch, RequestId


class Attempt(msgspec.Struct, frozen=True, order=True, omit_defaults=True):
    """One try at one request.

    Only the ingress raises `epoch`; only the scheduler raises `dispatch`, from 1 in each epoch. Between submit and
    placement `dispatch` is 0. Attempts of one request compare by (epoch, dispatch).
    """

    request_id: RequestId
    epoch: Epoch
    dispatch: Dispatch = Dispatch(0)

    def fences(self, other: Attempt) -> bool:
        """True if `other` is an older attempt at the same request."""
        return self.request_id == other.request_id and (self.epoch, self.dispatch) > (other.epoch, other.dispatch)
