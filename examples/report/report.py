"""Reads meter readings from the input share; writes a JSON report and an SVG chart to the output share.

Only the standard library. Run by `cargo xtask demo` in a microVM:
the CSV is /workspace/input/readings.csv, the working folder is /workspace/output.
"""

import csv
import json
import statistics
import sys
from collections import defaultdict

COLOURS = ["#1b6ca8", "#c8553d", "#588157", "#8d5a97", "#d4a017", "#2f4858"]
WIDTH, HEIGHT, MARGIN = 900, 420, 60


def read(path):
    """Rows of each station; readings that the meter missed are counted, not guessed."""
    stations, missing = defaultdict(list), 0
    with open(path, newline="", encoding="utf-8") as file:
        for row in csv.DictReader(file):
            if not row["energy_kwh"]:
                missing += 1
                continue
            stations[row["station"]].append(
                (row["time"], float(row["temperature_c"]), float(row["energy_kwh"]))
            )
    return dict(sorted(stations.items())), missing


def summary(rows):
    """Totals of one station and how its use follows the temperature."""
    temperatures = [row[1] for row in rows]
    energy = [row[2] for row in rows]
    peak = max(rows, key=lambda row: row[2])
    return {
        "readings": len(rows),
        "energy_kwh": {
            "total": round(sum(energy), 2),
            "mean": round(statistics.fmean(energy), 3),
            "peak": peak[2],
            "peak_time": peak[0],
        },
        "temperature_c": {"mean": round(statistics.fmean(temperatures), 3)},
        "correlation": round(statistics.correlation(temperatures, energy), 4),
    }


def daily(rows):
    """Energy of each day, in order."""
    days = defaultdict(float)
    for time, _, energy in rows:
        days[time[:10]] += energy
    return [days[day] for day in sorted(days)]


def chart(stations):
    """Energy a day, one line a station."""
    series = {name: daily(rows) for name, rows in stations.items()}
    top = max(max(values) for values in series.values())
    length = max(len(values) for values in series.values())

    def x(index):
        return MARGIN + index * (WIDTH - 2 * MARGIN) / max(1, length - 1)

    def y(value):
        return HEIGHT - MARGIN - value * (HEIGHT - 2 * MARGIN) / top

    out = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{HEIGHT}" '
        'font-family="sans-serif" font-size="12">',
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="#ffffff"/>',
        f'<text x="{MARGIN}" y="28" font-size="18">Energy a day, kWh</text>',
    ]
    for step in range(5):
        value = top * step / 4
        out.append(
            f'<line x1="{MARGIN}" x2="{WIDTH - MARGIN}" y1="{y(value):.1f}" y2="{y(value):.1f}" '
            'stroke="#dddddd"/>'
            f'<text x="{MARGIN - 8}" y="{y(value) + 4:.1f}" text-anchor="end">{value:.0f}</text>'
        )
    for index, (name, values) in enumerate(series.items()):
        colour = COLOURS[index % len(COLOURS)]
        points = " ".join(f"{x(i):.1f},{y(v):.1f}" for i, v in enumerate(values))
        left = MARGIN + index * 120
        out.append(f'<polyline points="{points}" fill="none" stroke="{colour}" stroke-width="2"/>')
        out.append(f'<rect x="{left}" y="{HEIGHT - 28}" width="12" height="12" fill="{colour}"/>')
        out.append(f'<text x="{left + 18}" y="{HEIGHT - 18}">{name}</text>')
    out.append("</svg>")
    return "\n".join(out) + "\n"


def main():
    stations, missing = read("/workspace/input/readings.csv")
    report = {
        "readings": sum(len(rows) for rows in stations.values()),
        "missing": missing,
        "stations": {name: summary(rows) for name, rows in stations.items()},
    }
    with open("report.json", "w", encoding="utf-8") as file:
        json.dump(report, file, indent=2)
        file.write("\n")
    with open("energy.svg", "w", encoding="utf-8") as file:
        file.write(chart(stations))
    print(f"{report['readings']} readings of {len(stations)} stations, {missing} missing", file=sys.stdout)


if __name__ == "__main__":
    main()
