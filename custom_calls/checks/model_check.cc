// Explores small exchange programs exhaustively (`model.h`), and mutants that break the protocol in one place each,
// which must be caught. Prints a line for each; exit status 1 if a program fails or a mutant does not.
#include <chrono>
#include <cstdio>
#include <string>
#include <vector>

#include "checks/model.h"

namespace einsummable::checks {
namespace {

double Seconds() {
  return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

// Whether the model fails exactly if it should.
bool Check(const Model& model, const std::string& mutant, const Mutation& mutation, bool should_fail) {
  Checker checker(model, mutation);
  const double begin = Seconds();
  const auto problem = checker.Run();
  const bool ok = problem.has_value() == should_fail;
  std::printf("%-7s %-36s %-18s %8lld states %6.2f s  %s\n", !ok ? "WRONG" : should_fail ? "caught" : "ok",
              model.name.c_str(), mutant.c_str(), static_cast<long long>(checker.num_states()), Seconds() - begin,
              problem ? problem->c_str() : "");
  return ok;
}

int Main() {
  Model gather("all-gather of 2, pull", AllGather(2, 1), 3);
  Model push("all-gather of 2, push", AllGather(2, 1), 3);
  Model reduce("all-reduce of 2", AllReduce(2, 1), 3);
  Model broadcast("staged broadcast to 1", StagedBroadcast(2, 1), 5);
  Model relay("relay through 3, push", Relay(3, 1), 3);
  Model gather_3("all-gather of 3, pull", AllGather(3, 1), 3);
  Model ring("ring of 3", Ring(3, 1), 3);
  Model reduce_3("all-reduce of 3", AllReduce(3, 1), 3);
  Model team("team of 2", LocalSum(), 3);
  Model teams("all-gather of 2, teams of 2", AllGather(2, 1), 1);
  Model missing("all-gather of 3, one missing", AllGather(3, 1), 2);
  push.copies = relay.copies = Copies::kPush;
  gather_3.oldest_only = ring.oldest_only = reduce_3.oldest_only = teams.oldest_only = true;
  team.workers = teams.workers = 2;
  missing.missing_rank = true;

  bool ok = true;
  for (const Model& model : {gather, push, reduce, broadcast, relay, gather_3, ring, reduce_3, team, teams, missing}) {
    ok &= Check(model, "-", {}, false);
  }
  for (const Model& model : {gather, push, reduce, broadcast, relay}) {
    ok &= Check(model, "relaxed publish", {.relaxed_publish = true}, true);
    ok &= Check(model, "relaxed wait", {.relaxed_wait = true}, true);
    ok &= Check(model, "early publish", {.early_publish = true}, true);
  }
  for (const Model& model : {gather, push, reduce}) {
    ok &= Check(model, "no start barrier", {.no_start_waits = true}, true);
  }
  for (const Model& model : {gather, push, ring}) {
    ok &= Check(model, "no end barrier", {.no_end_waits = true}, true);
  }
  for (const Model& model : {broadcast, relay}) {
    ok &= Check(model, "single-buffered", {.single_slot = true}, true);
    ok &= Check(model, "slots not awaited", {.no_slot_waits = true}, true);
  }
  for (const Model& model : {reduce, relay, ring}) {
    ok &= Check(model, "rounds not awaited", {.no_round_waits = true}, true);
  }
  ok &= Check(team, "relaxed count", {.relaxed_count = true}, true);
  return ok ? 0 : 1;
}

}  // namespace
}  // namespace einsummable::checks

int main() { return einsummable::checks::Main(); }
