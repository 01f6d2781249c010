//! Durations, and the names that things may have.

use std::time::Duration;

/// No duration is longer: a hundred years. Clocks overflow somewhere above.
pub(crate) const LONGEST: Duration = Duration::from_secs(100 * 366 * 86_400);

/// Reads `30s`, `1h30m`, `1.5h` or `500ms`; nothing longer than [`LONGEST`].
pub fn duration(text: &str) -> Option<Duration> {
    let mut rest = text.trim();
    if rest.is_empty() {
        return None;
    }
    let mut seconds = 0.0;
    while !rest.is_empty() {
        let unit_at = rest.find(|c: char| !c.is_ascii_digit() && c != '.')?;
        let number: f64 = rest[..unit_at].parse().ok()?;
        let after = &rest[unit_at..];
        let unit_end = after.find(|c: char| c.is_ascii_digit()).unwrap_or(after.len());
        seconds += number * unit(after[..unit_end].trim())?;
        rest = &after[unit_end..];
    }
    Duration::try_from_secs_f64(seconds).ok().filter(|read| *read <= LONGEST)
}

fn unit(name: &str) -> Option<f64> {
    match name {
        "ms" => Some(0.001),
        "s" => Some(1.0),
        "m" => Some(60.0),
        "h" => Some(3600.0),
        "d" => Some(86400.0),
        _ => None,
    }
}

pub(crate) use crate::name::is_name;

/// `[A-Za-z_][A-Za-z0-9_]*`: names of environment variables.
pub(crate) fn is_variable(text: &str) -> bool {
    is_name(text) && !text.contains('-')
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn durations_read() {
        for (text, milliseconds) in [
            ("30s", 30_000),
            ("2h", 7_200_000),
            ("1h30m", 5_400_000),
            ("500ms", 500),
            ("1.5m", 90_000),
            ("1d", 86_400_000),
        ] {
            assert_eq!(duration(text), Some(Duration::from_millis(milliseconds)), "{text}");
        }
    }

    #[test]
    fn what_is_no_duration_is_refused() {
        for text in [
            "",
            "30",
            "h",
            "1h30",
            "-1s",
            "1 fortnight",
            "1..5s",
            "1e9d",
            "36601d",
            "200000000000000d",
            "99999999999999999999d",
        ] {
            assert_eq!(duration(text), None, "{text}");
        }
    }

    proptest! {
        #[test]
        fn no_text_panics(text in ".{0,20}") {
            let _ = duration(&text);
        }
    }
}
