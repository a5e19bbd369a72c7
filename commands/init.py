"""`shardlight init`: a project of one's own from a template."""

import shlex
from pathlib import Path
from typing import Annotated

import typer
from shardlight.commands.output import Debug, fail, short_errors


def init(
    template: Annotated[str | None, typer.Argument(metavar="TEMPLATE", help="Which one; see --list.")] = None,
    folder: Annotated[Path | None, typer.Argument(metavar="DIR", help="The project's folder: new, or empty.")] = None,
    name: Annotated[
        str | None, typer.Option("--name", metavar="NAME", help="Of the project's package; by default that of DIR.")
    ] = None,
    show: Annotated[bool, typer.Option("--list", help="Show the templates, and stop.")] = False,
    debug: Debug = False,
) -> None:
    """Make a project from a template."""
    from shardlight.framework.faults import suggest
    from shardlight.framework.packages import installed
    from shardlight.templates.catalogue import find_templates

    templates = find_templates()
    if show:
        width = max(map(len, templates))
        for item in templates.values():
            typer.echo(f"{item.name:{width}}  {item.about}")
        return
    if template is None or folder is None:
        missing = "TEMPLATE and DIR are" if template is None else "DIR is"
        fail(f"{missing} missing: shardlight init TEMPLATE DIR. Templates: {', '.join(templates)}; --list says more.")
    if template not in templates:
        fail(f"There is no template {template!r}.{suggest(template, templates)} --list shows all.")
    with short_errors(debug, code=2):
        from shardlight.templates.generate import check_place, generate, package_name

        check_place(folder)
        package = package_name(folder, name)
        generate(templates[template], folder, package)
    chosen = templates[template]
    typer.echo(f"{folder}: made from the template {chosen.name}; its package is {package}. Next:")
    if missing_packages := [line for line in chosen.requires if not installed(line)]:
        typer.echo(f"  pip install {shlex.join(missing_packages)}")
    if folder.resolve() != Path.cwd():
        typer.echo(f"  cd {shlex.quote(str(folder))}")
    typer.echo("  shardlight fit config.yaml")
