"""`synlm push`: an exported folder in, a commit on the Hub out."""

from pathlib import Path
from typing import Annotated

import typer

from hf_synlm.cli import verify
from hf_synlm.hub.export import push_to_hub


def command(
    folder: Annotated[Path, typer.Argument(help="What `synlm export` or a training script wrote.")],
    repo_id: Annotated[str, typer.Argument(help="Name on the Hub, OWNER/NAME; made if it does not exist.")],
    private: Annotated[bool, typer.Option("--private", help="A new repository is private.")] = False,
    revision: Annotated[str | None, typer.Option(help="Branch, made if it does not exist; default: main.")] = None,
    message: Annotated[str, typer.Option(help="Message of the commit.")] = "Upload model",
    check: Annotated[bool, typer.Option("--verify/--no-verify", help="First do what `synlm verify` does.")] = True,
) -> None:
    """Upload a folder as one commit: all of it arrives, or nothing.

    The folder is verified before, and is not pushed if something differs (exit code 1). Hidden files stay home, pickles
    are refused. The token is that of `hf auth login` or of the environment variable HF_TOKEN; it is no option here,
    because the words of a command can be seen by others. Prints the hash of the commit, for `revision=`.

    Examples:
        synlm push gpst-tiny your-name/gpst-tiny --private
        synlm push gpst-tiny your-name/gpst-tiny --revision v2 --message "Trained twice as long" --no-verify
    """
    if check and not verify.report_passed(folder):
        typer.echo(f"{folder} was not pushed", err=True)
        raise typer.Exit(1)
    commit = push_to_hub(folder, repo_id, private=private, revision=revision, commit_message=message)
    typer.echo(f'pushed {repo_id}; load it by from_pretrained("{repo_id}", revision="{commit}", ...)', err=True)
    typer.echo(commit)
