"""Django's settings are the process's: one set-up for all tests that need them."""

import atexit
import shutil
import tempfile
from functools import cache
from pathlib import Path


@cache
def set_up() -> None:
    """Configure Django with django-celery-beat's tables in an SQLite file, once."""
    import django
    from django.conf import settings
    from django.core.management import call_command

    directory = tempfile.mkdtemp(prefix="celery-lease-django-")
    atexit.register(shutil.rmtree, directory, ignore_errors=True)
    path = Path(directory, "django.sqlite3")
    settings.configure(
        INSTALLED_APPS=["django.contrib.contenttypes", "django_celery_beat"],
        DATABASES={"default": {"ENGINE": "django.db.backends.sqlite3", "NAME": str(path)}},
        USE_TZ=True,
        SECRET_KEY="test",
        DEFAULT_AUTO_FIELD="django.db.models.AutoField",
    )
    django.setup()
    call_command("migrate", verbosity=0)
