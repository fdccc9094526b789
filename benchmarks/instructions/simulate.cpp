// Multiprocessors that execute traces, cycle by cycle; model.py describes them and has the numbers.
#include <algorithm>
#include <limits>
#include <vector>

namespace {

constexpr double kNever = std::numeric_limits<double>::infinity();
constexpr int kNone = 7;  // no scoreboard

// In the order of model.py.
enum Event { kPlain, kWait, kFree, kSums, kLoad, kStore, kSend, kBarrier, kRelease, kRead, kReread };

struct Step {
    int stall, waits, writes, reads, unit, event, bytes;
};
// Cycles, and bytes per cycle of all multiprocessors.
struct Setting {
    double memory, l2, l1, operands, barrier, exchange, load, block_start;
    double memory_speed, l2_speed;
    double in_l1, in_l2;  // shares of a row that its second pass finds
    double chunk_bytes, full;  // of a load of a chunk; of a warp's access, the part that is a row
    double stages;  // 0: a block is a row, and is followed by another one
};
struct Unit {
    double interval, latency;
};

// What all warps of a team have done, by number.
struct Done {
    struct Entry {
        int warps = 0;
        double last = 0;
    };
    std::vector<Entry> entries;

    void add(int number, double time) {
        if ((int)entries.size() <= number) entries.resize(number + 1);
        ++entries[number].warps;
        entries[number].last = time;
    }
    double by(int number, int warps) const {
        if (number < 0) return 0;
        const bool known = number < (int)entries.size() && entries[number].warps == warps;
        return known ? entries[number].last : kNever;
    }
};

struct Queue {
    double speed, free = 0;
    double serve(double time, double bytes) { return free = std::max(free, time) + bytes / speed; }
};

struct Warp;
struct Team {  // the warps of a block
    std::vector<Warp*> members;
    int warps = 0, at_barrier = 0, ended = 0, rows = 0;
    std::vector<double> arrivals;
    Done releases, sends;
};

struct Warp {
    const Step *begin, *end, *at;
    int partition, team, loader;
    double time, last = 0, ready = 0;  // until the scoreboards that it waits for
    double boards[8] = {};
    int waited = 0, released = 0, loaded = 0, row = 0, reads = 0, rereads = 0;
    bool sent = false;
};

struct Partition {
    std::vector<Warp*> warps;
    std::vector<double> units;
    double clock = 0;
    Warp* next = nullptr;
    double when = kNever;
    bool changed = true;
};

}  // namespace

// warps: {first step, end, partition, team, loads, begin} each; a multiprocessor is four partitions.
// Writes when each team had finished each row, and the instructions that the first, second, ...
// partitions of all multiprocessors issued until `ends`.
extern "C" void simulate(const Step* steps, const int (*placed)[6], int warp_count,
                         const Unit* costs, int unit_count, const Setting* settings, int team_count,
                         int partition_count, int rows, double* finished, double* issued, double* ends) {
    const Setting& set = *settings;
    std::vector<Team> teams(team_count);
    std::vector<Warp> warps(warp_count);
    std::vector<Partition> partitions(partition_count);
    for (int i = 0; i < warp_count; ++i) {
        const auto& [first, end, partition, team, loads, begin] = placed[i];
        warps[i] = {steps + first, steps + end, steps + first, partition, team, loads,
                    (double)begin};
        partitions[partition].warps.push_back(&warps[i]);
        teams[team].members.push_back(&warps[i]);
        teams[team].warps += !loads;
    }
    for (Partition& each : partitions) each.units.assign(unit_count, 0);
    Queue memory{set.memory_speed}, l2{set.l2_speed};
    const auto from_memory = [&](double time, double bytes) {
        return std::max(memory.serve(time, bytes), l2.serve(time, bytes));
    };

    const auto blocked_until = [&](const Warp& warp, int event) {
        const Team& team = teams[warp.team];
        if (event == kWait) {
            const bool known = warp.waited < (int)team.arrivals.size();
            return known ? team.arrivals[warp.waited] : kNever;
        }
        const int chunk = warp.loaded - (int)set.stages;
        if (event == kFree) return team.releases.by(chunk, team.warps);
        if (event == kSums) return team.sends.by(warp.row - 1, team.warps) + set.exchange;
        return 0.0;
    };
    const auto choose = [&](Partition& partition) {
        partition.changed = false;
        partition.next = nullptr;
        partition.when = kNever;
        for (Warp* warp : partition.warps) {
            if (warp->at == warp->end || warp->time == kNever) continue;
            const Step& step = *warp->at;
            const double time =
                std::max({warp->time, warp->ready, partition.clock, partition.units[step.unit],
                          blocked_until(*warp, step.event)});
            // Of those that are ready, the one that has waited longest.
            const bool first = time < partition.when ||
                               (time == partition.when && time < kNever &&
                                warp->last < partition.next->last);
            if (first) {
                partition.when = time;
                partition.next = warp;
            }
        }
    };
    const auto finish_row = [&](int team, double time) {
        if (teams[team].rows < rows) finished[team * rows + teams[team].rows++] = time;
    };

    for (;;) {
        Partition* best = nullptr;
        for (Partition& each : partitions) {
            if (each.changed) choose(each);
            if (each.next && (!best || each.when < best->when)) best = &each;
        }
        if (!best) return;
        Warp& warp = *best->next;
        Team& team = teams[warp.team];
        const double now = best->when;
        const Step& step = *warp.at++;
        const double bytes = set.full * step.bytes;
        double done = now + costs[step.unit].latency;
        bool others = true;
        warp.last = now;
        warp.time = now + std::max(step.stall, 1);
        best->clock = now + 1;
        best->units[step.unit] = now + costs[step.unit].interval;
        best->changed = true;
        issued[warp.partition % 4] += 1;
        *ends = now;
        switch (step.event) {
            case kWait: ++warp.waited; warp.sent = others = false; break;
            case kStore: from_memory(now, bytes); others = false; break;
            case kLoad:
                ++warp.loaded;
                team.arrivals.push_back(from_memory(now, set.chunk_bytes) + set.load);
                break;
            case kRelease: team.releases.add(warp.released++, now); break;
            case kSend:
                if (warp.sent) break;
                warp.sent = true;
                team.sends.add(warp.row, now);
                if (team.sends.by(warp.row++, team.warps) == now) finish_row(warp.team, now);
                break;
            case kRead:
                ++warp.reads;
                done = from_memory(now, bytes) + set.memory;
                break;
            case kReread: {
                const int place = warp.rereads++;
                if (place < set.in_l1 * warp.reads) {
                    done = now + set.l1;
                } else if (place < set.in_l2 * warp.reads) {
                    done = l2.serve(now, bytes) + set.l2;
                } else {
                    done = from_memory(now, bytes) + set.memory;
                }
                break;
            }
            case kBarrier:
                warp.time = kNever;
                if (++team.at_barrier < team.warps) break;
                team.at_barrier = 0;
                for (Warp* each : team.members) {
                    if (each->time == kNever) each->time = now + set.barrier;
                }
                break;
            default: others = false;
        }
        if (step.writes < kNone) warp.boards[step.writes] = std::max(warp.boards[step.writes], done);
        if (step.reads < kNone) {
            const double read = now + std::min(costs[step.unit].latency, set.operands);
            warp.boards[step.reads] = std::max(warp.boards[step.reads], read);
        }
        warp.ready = 0;
        for (int board = 0; board < 6 && warp.at != warp.end; ++board) {
            if (warp.at->waits >> board & 1) warp.ready = std::max(warp.ready, warp.boards[board]);
        }
        if (warp.at == warp.end && set.stages == 0 && ++team.ended == team.warps) {
            others = true;
            team.ended = 0;
            finish_row(warp.team, now);
            for (Warp* each : team.members) {
                if (team.rows >= rows) continue;
                *each = {each->begin, each->end, each->begin, each->partition, each->team, 0,
                         now + set.block_start};
            }
        }
        if (others) {
            const auto mine = partitions.begin() + warp.partition / 4 * 4;
            std::for_each(mine, mine + 4, [](Partition& each) { each.changed = true; });
        }
    }
}
