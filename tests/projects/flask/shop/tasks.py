"""The tables and tasks of the shop."""

import os
import time
from pathlib import Path
from typing import Any

from celery import shared_task
from sqlalchemy import Column, Integer, String

from celery_leases.web.flask import LeasedTask
from shop import db


class Order(db.Model):  # type: ignore[name-defined,misc]
    """An order that was charged."""

    __tablename__ = "orders"
    id = Column(Integer, primary_key=True)
    number = Column(String(50), nullable=False)
    amount = Column(Integer, nullable=False)


def charge(idempotency_key: str) -> dict[str, str]:
    """A stand-in for an external system that records each charge."""
    with Path(os.environ["SHOP_LEDGER"]).open("a") as ledger:
        ledger.write(f"{idempotency_key}\n")
    return {"charge": idempotency_key}


@shared_task(base=LeasedTask, bind=True, lease_key="order:{number}")
def order(self: Any, number: str, amount: int = 1) -> dict[str, Any]:
    """Charge an order, and write it down in one transaction with the record of the task."""
    self.lease.effect("charge", charge)
    while gate := os.environ.get("SHOP_GATE"):  # a test holds it here
        if Path(gate).exists():
            break
        time.sleep(0.05)
    db.session.add(Order(number=number, amount=amount))
    result = {"order": number, "attempt": self.lease.attempt}
    self.lease.complete(result, db.session)
    db.session.commit()
    return result
