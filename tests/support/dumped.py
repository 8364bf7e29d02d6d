"""Return parts of a configuration as --print_config tells them."""

import yaml
from jsonargparse import ActionConfigFile

from lightning_rl.cli.parser import RLArgumentParser, checked_sources


def of(name, /, **arguments):
    return {"class_path": name, "init_args": arguments}


def dumped(parser, file):
    """Return what --print_config would print, and a run would keep."""
    arguments = ["--config", str(file)]
    checked_sources(arguments, parser, None)
    return parser.dump(parser.parse_args(arguments), skip_unset=False)


def require_same_again(hint, part, file):
    """Require that a part's text reads without a mistake and tells the same; return it."""
    parser = RLArgumentParser(description="")
    parser.add_argument("-c", "--config", action=ActionConfigFile)
    parser.add_argument("--parts", type=list[hint])
    file.write_text(yaml.safe_dump({"parts": [part]}))
    told = dumped(parser, file)
    assert " at 0x" not in told
    assert "Unable to serialize" not in told
    file.write_text(told)
    assert dumped(parser, file) == told
    return parser, yaml.safe_load(told)["parts"][0]
