//! Figures as aligned tables that are Markdown as well.

/// Writes rows below a heading; every row has as many cells as the heading.
pub(super) fn render(heading: &[&str], rows: &[Vec<String>]) -> String {
    let heading: Vec<String> = heading.iter().map(|cell| (*cell).to_owned()).collect();
    let all = || std::iter::once(&heading).chain(rows);
    let widths: Vec<usize> = (0..heading.len())
        .map(|column| {
            all().filter_map(|row| row.get(column)).map(|c| c.chars().count()).max().unwrap_or(0)
        })
        .collect();
    let line = |row: &Vec<String>| {
        let mut text = String::from("|");
        for (column, (cell, width)) in row.iter().zip(&widths).enumerate() {
            let width = *width;
            // Words on the left, figures on the right.
            match column {
                0 => text.push_str(&format!(" {cell:<width$} |")),
                _ => text.push_str(&format!(" {cell:>width$} |")),
            }
        }
        text.push('\n');
        text
    };
    let mut text = line(&heading);
    text.push('|');
    for (column, width) in widths.iter().enumerate() {
        let dashes = "-".repeat(width + 1);
        text.push_str(&if column == 0 { format!("{dashes}-|") } else { format!("{dashes}:|") });
    }
    text.push('\n');
    for row in rows {
        text.push_str(&line(row));
    }
    text
}

/// The median and how far the others are from it, `34.5 ±0.2`; one decimal.
pub(super) fn spread(values: &[f64]) -> String {
    match median(values) {
        None => "-".to_owned(),
        Some(middle) => {
            let far = values.iter().map(|value| (value - middle).abs()).fold(0.0, f64::max);
            format!("{middle:.1} ±{far:.1}")
        }
    }
}

/// The median; of an even number, the mean of the two in the middle.
pub(super) fn median(values: &[f64]) -> Option<f64> {
    let mut sorted = values.to_vec();
    sorted.sort_by(f64::total_cmp);
    let half = sorted.len() / 2;
    let upper = *sorted.get(half)?;
    if sorted.len() % 2 == 1 {
        return Some(upper);
    }
    let lower = *sorted.get(half.checked_sub(1)?)?;
    Some(f64::midpoint(lower, upper))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn columns_are_aligned() {
        let rows =
            [vec!["a".to_owned(), "1.0 ±0.1".to_owned()], vec!["bcd".to_owned(), "-".into()]];
        let text = render(&["name", "figure"], &rows);
        let widths: Vec<usize> = text.lines().map(|line| line.chars().count()).collect();
        assert!(widths.iter().all(|width| *width == widths[0]), "{text}");
        assert!(text.lines().nth(1).is_some_and(|line| line.ends_with("-:|")), "{text}");
    }

    #[test]
    fn medians() {
        assert_eq!(median(&[]), None);
        assert_eq!(median(&[3.0, 1.0, 2.0]), Some(2.0));
        assert_eq!(median(&[4.0, 1.0]), Some(2.5));
        assert_eq!(spread(&[34.5, 34.4, 35.0]), "34.5 ±0.5");
        assert_eq!(spread(&[]), "-");
    }
}
