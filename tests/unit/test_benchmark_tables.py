"""What benchmarks write into the documentation, from numbers that are known."""

from benchmarks import faults, scaling
from benchmarks.results import write_block

RESULTS = """<testsuites><testsuite>
<testcase name="test_a"><properties>
<property name="other" value="1"/>
<property name="fault" value='["a layer left out", "`IncompleteWeightsError` naming it", 0.1234]'/>
</properties></testcase>
<testcase name="test_b[memory]"><properties>
<property name="fault" value='["a server killed", "started anew", 44.8]'/>
</properties></testcase>
<testcase name="test_c"/>
</testsuite></testsuites>"""


def test_each_fault_is_a_line_with_its_test(tmp_path):
    file = tmp_path / "results.xml"
    file.write_text(RESULTS)
    assert faults.table(faults.faults_in(file))[2:] == [
        "| a layer left out | `IncompleteWeightsError` naming it | 0.12 | `test_a` |",
        "| a server killed | started anew | 45 | `test_b` |",
    ]


def test_a_block_takes_the_place_of_the_one_before_and_of_nothing_else(tmp_path):
    page = tmp_path / "page.md"
    page.write_text("before\n<!-- t -->\n| old |\n\nold\n<!-- /t -->\n| kept |\n")
    write_block(page, "t", ["| new |", "", "new"])
    assert page.read_text() == "before\n<!-- t -->\n| new |\n\nnew\n<!-- /t -->\n| kept |\n"


def test_scaling_compares_two_processes_with_one():
    row = {"generate": 1.5, "logprob": 0.0, "train": 2.0, "sync": 0.1, "tokens": 2560.0}
    one = row | {"wall_s": 4.0, "cpu_s": 3.8, "tokens_per_s": 640.0}
    two = row | {"wall_s": 2.5, "cpu_s": 4.2, "tokens_per_s": 1024.0}
    results = {"small": {"parameters": 1_600_000, "speedup": 1.6, "1": one, "2": two}}
    assert scaling.table(results)[2:] == [
        "| 1.6 M | 2560 | 1 | 4.00 | 1.50, 2.00 | 3.80 | 640 |",
        "| 1.6 M | 2560 | 2 | 2.50 (1.60× as fast) | 1.50, 2.00 | 4.20 | 1,024 |",
    ]
