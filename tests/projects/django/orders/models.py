"""Orders and their charges."""

from django.db import models


class Order(models.Model):
    """Something that was bought."""

    number = models.IntegerField(unique=True)
    charges = models.IntegerField(default=0)

    def __str__(self) -> str:
        return f"order {self.number}"
