//! `strftime_now`: the date some templates write into the system message, in UTC.

use std::time::{SystemTime, UNIX_EPOCH};

const MONTHS: [&str; 12] =
    ["January", "February", "March", "April", "May", "June", "July", "August", "September", "October", "November", "December"];
/// From the day of the week of 1 January 1970.
const DAYS: [&str; 7] = ["Thursday", "Friday", "Saturday", "Sunday", "Monday", "Tuesday", "Wednesday"];

fn is_leap(year: u64) -> bool {
    year.is_multiple_of(4) && (!year.is_multiple_of(100) || year.is_multiple_of(400))
}

fn month_days(year: u64, month: usize) -> u64 {
    match month {
        1 if is_leap(year) => 29,
        1 => 28,
        3 | 5 | 8 | 10 => 30,
        _ => 31,
    }
}

/// Formats a time like `strftime` in the C locale; directives it does not know are written as they are. Times before 1970 count as 1970.
pub(super) fn strftime(format: &str, time: SystemTime) -> String {
    let seconds = time.duration_since(UNIX_EPOCH).map_or(0, |since| since.as_secs());
    let (days, second_of_day) = (seconds / 86_400, seconds % 86_400);
    let mut year = 1970;
    let mut day_of_year = days;
    while day_of_year >= 365 + u64::from(is_leap(year)) {
        day_of_year -= 365 + u64::from(is_leap(year));
        year += 1;
    }
    let mut month = 0;
    let mut day = day_of_year;
    while day >= month_days(year, month) {
        day -= month_days(year, month);
        month += 1;
    }
    let (hour, minute, second) = (second_of_day / 3600, second_of_day / 60 % 60, second_of_day % 60);
    let weekday = DAYS[usize::try_from(days % 7).unwrap_or_default()];
    let mut out = String::new();
    let mut characters = format.chars();
    while let Some(character) = characters.next() {
        if character != '%' {
            out.push(character);
            continue;
        }
        match characters.next() {
            Some('Y') => out += &format!("{year:04}"),
            Some('y') => out += &format!("{:02}", year % 100),
            Some('m') => out += &format!("{:02}", month + 1),
            Some('d') => out += &format!("{:02}", day + 1),
            Some('e') => out += &format!("{:2}", day + 1),
            Some('j') => out += &format!("{:03}", day_of_year + 1),
            Some('B') => out += MONTHS[month],
            Some('b' | 'h') => out += &MONTHS[month][..3],
            Some('A') => out += weekday,
            Some('a') => out += &weekday[..3],
            Some('H') => out += &format!("{hour:02}"),
            Some('I') => out += &format!("{:02}", (hour + 11) % 12 + 1),
            Some('p') => out += if hour < 12 { "AM" } else { "PM" },
            Some('M') => out += &format!("{minute:02}"),
            Some('S') => out += &format!("{second:02}"),
            Some('F') => out += &format!("{year:04}-{:02}-{:02}", month + 1, day + 1),
            Some('T') => out += &format!("{hour:02}:{minute:02}:{second:02}"),
            Some('Z') => out += "UTC",
            Some('%') => out.push('%'),
            Some(other) => out.extend(['%', other]),
            None => out.push('%'),
        }
    }
    out
}

#[cfg(test)]
mod tests {
    use super::strftime;
    use std::time::{Duration, UNIX_EPOCH};

    #[test]
    fn dates_are_those_of_the_calendar() {
        let at = |seconds| strftime("%a %d %B %Y %H:%M:%S %I%p %j %y%%%q", UNIX_EPOCH + Duration::from_secs(seconds));
        assert_eq!(at(0), "Thu 01 January 1970 00:00:00 12AM 001 70%%q");
        assert_eq!(at(951_782_399), "Mon 28 February 2000 23:59:59 11PM 059 00%%q");
        assert_eq!(at(951_782_400), "Tue 29 February 2000 00:00:00 12AM 060 00%%q");
        assert_eq!(at(1_798_761_599), "Thu 31 December 2026 23:59:59 11PM 365 26%%q");
    }
}
