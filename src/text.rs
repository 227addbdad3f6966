//! Text of a guest made safe to show: to a person's terminal, and to a model that would read what the
//! person cannot see.
//!
//! Escape sequences of terminals are left out. Every other character that is invisible or reorders
//! its neighbours is written as `\u{…}`, so that it can be seen, and cannot act.

/// Whether a character is invisible or changes how its neighbours are shown: controls, directional
/// marks, zero-width characters, the tag block and the variation selectors in which text can be hidden
/// (Unicode Standard Annex 9, Technical Standard 39, and the blocks' charts).
pub(crate) fn is_hidden(c: char) -> bool {
    matches!(c,
        '\u{00}'..='\u{08}' | '\u{0b}'..='\u{1f}' | '\u{7f}'..='\u{9f}'
        | '\u{ad}' | '\u{34f}' | '\u{61c}' | '\u{115f}' | '\u{1160}' | '\u{17b4}' | '\u{17b5}'
        | '\u{180b}'..='\u{180f}' | '\u{200b}'..='\u{200f}' | '\u{2028}'..='\u{202e}'
        | '\u{2060}'..='\u{206f}' | '\u{3164}' | '\u{fe00}'..='\u{fe0e}' | '\u{feff}'
        | '\u{ffa0}' | '\u{fff9}'..='\u{fffb}' | '\u{1d173}'..='\u{1d17a}'
        | '\u{e0000}'..='\u{e0fff}')
}

/// Bytes as text. What is no UTF-8 becomes U+FFFD in either form; `raw` leaves the rest as it is.
pub(crate) fn of(bytes: &[u8], raw: bool) -> String {
    let text = String::from_utf8_lossy(bytes);
    if raw { text.into_owned() } else { safe(&text) }
}

/// The text with what acts unseen made visible. A carriage return becomes the line break that it looks
/// like.
pub(crate) fn safe(text: &str) -> String {
    clean(text, push_escaped)
}

/// The text without what acts unseen: for what a model takes as its instructions, to which even the
/// visible form could say something.
pub(crate) fn stripped(text: &str) -> String {
    clean(text, |_, _| {})
}

/// As [`safe`], with `hidden` for each hidden character that is left.
fn clean(text: &str, hidden: impl Fn(&mut String, char)) -> String {
    let mut out = String::with_capacity(text.len());
    let mut rest = text.chars();
    while let Some(c) = rest.next() {
        match c {
            '\u{1b}' | '\u{9b}' | '\u{90}' | '\u{98}' | '\u{9d}'..='\u{9f}' => {
                if let Some(after) = after_sequence(c, rest.as_str()) {
                    rest = after.chars();
                } else {
                    hidden(&mut out, c);
                }
            }
            '\r' => {
                if !rest.as_str().starts_with('\n') {
                    out.push('\n');
                }
            }
            c if is_hidden(c) => hidden(&mut out, c),
            c => out.push(c),
        }
    }
    out
}

/// The first characters of a name that may hold anything, for a message.
pub(crate) fn brief(name: &str, most: usize) -> String {
    name.chars().take(most).flat_map(char::escape_default).collect()
}

fn push_escaped(out: &mut String, c: char) {
    out.extend(c.escape_unicode());
}

/// What follows the control sequence (ECMA-48) that `first` begins; `None` if it begins none that is
/// whole and of a reasonable length.
fn after_sequence(first: char, rest: &str) -> Option<&str> {
    const MOST: usize = 4096;
    let (kind, rest) = match first {
        '\u{1b}' => {
            let mut chars = rest.chars();
            (chars.next()?, chars.as_str())
        }
        '\u{9b}' => ('[', rest),
        '\u{9d}' => (']', rest),
        _ => ('P', rest),
    };
    match kind {
        // Parameters, then intermediates, then one final character.
        '[' => {
            let rest = rest.trim_start_matches(|c| ('0'..='?').contains(&c));
            let rest = rest.trim_start_matches(|c| (' '..='/').contains(&c));
            let mut chars = rest.chars();
            ('@'..='~').contains(&chars.next()?).then_some(chars.as_str())
        }
        // A string up to its terminator, BEL or ST.
        ']' | 'P' | 'X' | '^' | '_' => {
            let end = rest
                .char_indices()
                .take(MOST)
                .find(|(_, c)| matches!(c, '\u{07}' | '\u{1b}' | '\u{9c}' | '\n'))?;
            let after = rest.get(end.0.checked_add(end.1.len_utf8())?..)?;
            match end.1 {
                '\u{1b}' => after.strip_prefix('\\'),
                '\n' => None,
                _ => Some(after),
            }
        }
        ' '..='/' => {
            let rest = rest.trim_start_matches(|c| (' '..='/').contains(&c));
            let mut chars = rest.chars();
            ('0'..='~').contains(&chars.next()?).then_some(chars.as_str())
        }
        '0'..='~' => Some(rest),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn ordinary_text_of_any_script_is_unchanged() {
        for text in ["", "a\tb\nc", "héllo — 日本語 עברית العربية 🦀 ❤️", "x\\u{1b}"]
        {
            assert_eq!(safe(text), text);
        }
    }

    #[test]
    fn sequences_of_terminals_are_left_out() {
        for (bytes, wanted) in [
            ("\u{1b}[31mred\u{1b}[0m", "red"),
            ("\u{1b}[2J\u{1b}[1;1Hx", "x"),
            ("\u{1b}]0;title\u{7}x", "x"),
            ("\u{1b}]8;;http://evil\u{1b}\\link\u{1b}]8;;\u{1b}\\", "link"),
            ("\u{1b}Pq#0;2;0;0;0\u{1b}\\x", "x"),
            ("\u{9b}31mred", "red"),
            ("\u{1b}(Bx", "x"),
            ("\u{1b}cx", "x"),
        ] {
            assert_eq!(safe(bytes), wanted, "{bytes:?}");
        }
        // One that does not end takes nothing with it.
        assert_eq!(safe("\u{1b}]0;open\nnext"), "\\u{1b}]0;open\nnext");
        assert_eq!(safe("\u{1b}[31"), "\\u{1b}[31");
        assert_eq!(safe("\u{1b}"), "\\u{1b}");
    }

    #[test]
    fn what_acts_unseen_is_seen() {
        assert_eq!(safe("a\0b"), "a\\u{0}b");
        assert_eq!(safe("user\u{202e}nimda"), "user\\u{202e}nimda");
        assert_eq!(safe("pay\u{200b}pal"), "pay\\u{200b}pal");
        assert_eq!(safe("\u{feff}\u{2066}x\u{2069}"), "\\u{feff}\\u{2066}x\\u{2069}");
        let tags: String =
            "hi".chars().map(|c| char::from_u32(0xe0000 + c as u32).unwrap()).collect();
        assert_eq!(safe(&tags), "\\u{e0068}\\u{e0069}");
        assert_eq!(safe("50%\r100%\r\ndone\r"), "50%\n100%\ndone\n");
        assert_eq!(of(b"\xff\xfea\0", false), "\u{fffd}\u{fffd}a\\u{0}");
        assert_eq!(of(b"\xffa\0\x1b[1m", true), "\u{fffd}a\0\u{1b}[1m");
    }

    #[test]
    fn what_acts_unseen_can_be_left_out_altogether() {
        let tags: String =
            "do evil".chars().map(|c| char::from_u32(0xe0000 + c as u32).unwrap()).collect();
        let text = format!("read\u{200b} a\u{202e} file{tags}\0\u{1b}[8m, now\r\nor later\u{1b}");
        assert_eq!(stripped(&text), "read a file, now\nor later");
    }

    proptest! {
        #[test]
        fn nothing_hidden_is_left_and_a_second_time_changes_nothing(
            text in "[\\PC\\x00-\\x1f\\x7f-\\x9f\\u{200b}-\\u{202e}\\u{e0041}]{0,60}"
        ) {
            let once = safe(&text);
            prop_assert!(!once.chars().any(is_hidden));
            prop_assert_eq!(safe(&once), once.clone());
        }
    }
}
