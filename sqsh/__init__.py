"""Convert any container image to a squashfs in one stream: without unpacking or root, reproducibly."""

__version__ = "0.2.0"
