"""A small shop on Flask: an order is charged once, however often the button is pressed."""

import os
from typing import Any

from flask import Flask, request
from flask_migrate import Migrate
from flask_sqlalchemy import SQLAlchemy

from celery_leases.alembic import include_object
from celery_leases.web.flask import CeleryLeases, leases_blueprint

db = SQLAlchemy()
migrate = Migrate(include_object=include_object)
leases = CeleryLeases()


def may_see(key: str, task: str | None) -> bool:
    """Whether the request is that of a customer of the shop."""
    return task == "shop.tasks.order" and request.headers.get("Authorization") == "customer"


def create_app(**config: Any) -> Flask:
    """The app; *config* goes over its settings."""
    app = Flask(__name__)
    app.config["SQLALCHEMY_DATABASE_URI"] = os.environ.get("SHOP_DATABASE_URL", "sqlite:///shop.db")
    app.config["CELERY"] = {
        "broker_url": os.environ.get("SHOP_BROKER_URL", "redis://localhost/0"),
        "leases_url": "database",
        "leases_ttl": 5,
        "task_ignore_result": True,
    }
    app.config.update(config)
    db.init_app(app)
    migrate.init_app(app, db)
    leases.init_app(app)
    app.register_blueprint(leases_blueprint(may_see))

    from shop import tasks

    @app.post("/orders/<number>")
    def order(number: str) -> Any:
        amount = int(request.args.get("amount", 1))
        return leases.submit(tasks.order, (number, amount), session=None)

    @app.post("/saved/<number>")
    def saved(number: str) -> Any:
        """As above, but in one transaction with a row of the shop's."""
        db.session.add(tasks.Order(number=f"saved {number}", amount=0))
        sent = leases.submit(tasks.order, (number,), session=db.session)
        if request.args.get("fails"):
            db.session.rollback()
        else:
            db.session.commit()
        return sent

    return app
