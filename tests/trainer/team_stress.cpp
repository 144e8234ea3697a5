// Thousands of phases over more threads than cores, some of which fall asleep at work. `team_stress THREADS RUNS PATIENCE`
//
// Exit status: 0 all is right; 1 an item was done twice, never, or beside an item of another phase; 2 no item was done for so many
// seconds (PATIENCE) in which this process was allowed to run: the team is stuck.
#include <cstdio>
#include <cstdlib>
#include <random>

#include "team.h"

static std::atomic<int> living{0};
struct Ready {
    Ready() { living++; }
    ~Ready() { living--; }
};

static std::atomic<int64_t> progress{0};
static std::atomic<bool> finished{false};

[[noreturn]] static void fail(const char* what, int status) {
    std::printf("%s after %lld items\n", what, (long long)progress.load());
    std::fflush(stdout);
    std::_Exit(status);
}

// Counts its own turns, not the clock's: on a machine that is slow it is slow as well.
static void watch(int patience) {
    int64_t seen = -1;
    for (int idle = 0; !finished; idle++) {
        if (progress != seen) seen = progress, idle = 0;
        if (idle > patience * 100) fail("stuck", 2);
        std::this_thread::sleep_for(std::chrono::milliseconds(10));
    }
}

struct Check {
    std::vector<int> sizes;
    std::vector<std::vector<int>> done;  // plain numbers: a race on them is a race of the team, which -fsanitize=thread sees
    std::vector<int64_t> sums;           // of phase i: made by one item of it out of all the items of phase i - 1

    void item(int phase, int i) {
        if (phase && i == 0) {
            int64_t sum = 0;
            for (int other : done[phase - 1]) sum += other;
            sums[phase - 1] = sum;
        }
        done[phase][i]++;
        progress++;
    }
    void judge() const {
        for (size_t phase = 0; phase < sizes.size(); phase++) {
            for (int count : done[phase])
                if (count != 1) fail("an item was not done once", 1);
            if (phase + 1 < sizes.size() && sizes[phase + 1] > 0 && sums[phase] != sizes[phase]) fail("a phase began too early", 1);
        }
    }
};

static void one_run(Team<Ready>& team, std::mt19937& numbers) {
    Check check;
    for (int count = 1 + numbers() % 40; count; count--) {
        const int kinds[] = {0, 1, 1, 2, 3, (int)(numbers() % 20), (int)(numbers() % 400)};
        const bool very_many = numbers() % 500 == 0;  // more than the team counts one by one
        check.sizes.push_back(very_many ? 65'535 + numbers() % 100'000 : kinds[numbers() % 7]);
        check.done.emplace_back(check.sizes.back());
    }
    check.sums.resize(check.sizes.size());
    Plan plan;
    for (size_t phase = 0; phase < check.sizes.size(); phase++) {
        const unsigned sleepy = numbers() % 8 || check.sizes[phase] > 400 ? 0 : 1 + numbers() % 50;
        plan.each(check.sizes[phase], [&check, phase, sleepy](int i) {
            if (sleepy && i % sleepy == 0) std::this_thread::sleep_for(std::chrono::microseconds(i * 37 % 300));
            check.item((int)phase, i);
        });
    }
    team.run(plan.phases.data(), (int)plan.phases.size());
    check.judge();  // and then all of it is destroyed, which a thread that comes late must not mind
}

int main(int, char** arguments) {
    const int threads = std::atoi(arguments[1]), runs = std::atoi(arguments[2]);
    std::thread watching(watch, std::atoi(arguments[3]));
    std::mt19937 numbers(1);
    for (int made = 0; made < 4; made++) {  // teams come and go
        Team<Ready> team(threads);
        for (int i = 0; i < runs; i++) {
            one_run(team, numbers);
            if (numbers() % 4 == 0) std::this_thread::sleep_for(std::chrono::microseconds(numbers() % 500));  // all fall asleep
        }
    }
    if (living) fail("a thread left without tidying up", 1);
    finished = true;
    watching.join();
    std::printf("%lld items\n", (long long)progress.load());
}
