"""docs/performance.md: each benchmark writes a section of its own, between two marks."""

from pathlib import Path

HEAD = "# Performance\n\nWhat `make bench` measured; each section says with what.\n"


def put_section(page: Path, name: str, text: str) -> None:
    """Put `text` in place of the section `name`, at the end where there is none yet."""
    begin, end = f"<!-- {name}: begin -->", f"<!-- {name}: end -->"
    present = page.read_text(encoding="utf-8") if page.exists() else HEAD
    section = f"{begin}\n{text.strip()}\n{end}"
    before, found, rest = present.partition(begin)
    if not found:
        whole = f"{present.rstrip()}\n\n{section}\n"
    else:
        _, ended, after = rest.partition(end)
        if not ended:
            raise ValueError(f"{page}: «{begin}» has no «{end}»")
        whole = before + section + after
    part = page.with_name(f".{page.name}.part")
    part.write_text(whole, encoding="utf-8")
    part.replace(page)
