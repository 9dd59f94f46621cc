"""The Celery app and the tasks of the shop: ``celery -A shop.tasks worker``."""

import os
import time
from pathlib import Path
from typing import Any

from celery import Celery

from celery_leases import LeasedTask

app = Celery("shop", broker=os.environ.get("SHOP_BROKER_URL", "redis://localhost/0"))
app.conf.update(
    leases_url="database",
    leases_database_url=os.environ.get("SHOP_DATABASE_URL", "sqlite:///shop.db"),
    task_ignore_result=True,
)


@app.task(base=LeasedTask, bind=True, lease_key="order:{request_key}")
def order(self: Any, request_key: str, amount: int) -> dict[str, Any]:
    """Charge an order in three steps."""
    with Path(os.environ["SHOP_LEDGER"]).open("a") as ledger:
        ledger.write(f"{request_key} {amount}\n")
    while gate := os.environ.get("SHOP_GATE"):  # a test holds it here
        if Path(gate).exists():
            break
        time.sleep(0.05)
    self.lease.save_progress({"charged": amount})
    return {"amount": amount, "attempt": self.lease.attempt}
