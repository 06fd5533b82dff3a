"""Any container image to a squashfs in one stream: nothing unpacked, no root, the same bytes everywhere."""

__version__ = "0.2.0"
